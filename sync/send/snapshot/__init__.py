"""Snapshots: a rank's private copies of its shards in the wire dtype, taken while the next training step already computes."""
