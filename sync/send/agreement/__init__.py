"""What trainer ranks tell each other about a version before it is offered: deltas, magnitudes, and digests of copies."""
