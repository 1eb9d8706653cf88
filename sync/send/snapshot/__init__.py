"""Snapshots: a rank's private copy of its shards, taken while the next training step already computes."""
