"""Deltas: each sender encodes its part, receivers decode it while it arrives and apply it at the commit."""
