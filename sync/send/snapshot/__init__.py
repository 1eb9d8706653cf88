"""A snapshot: a rank's private copy of its shards in the wire dtype, taken while the next training step already computes."""
