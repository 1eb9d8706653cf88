"""Trainer ranks agree on a version before rank 0 offers it: on codec, deltas, scales of divided blocks, and equal replicas."""
