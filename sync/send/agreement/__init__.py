"""Trainer ranks agree on a version before rank 0 offers it: on deltas, scales of divided blocks, and equal copies."""
