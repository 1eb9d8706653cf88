"""Versions sent as deltas: encoded by each sender, decoded while they arrive, applied at the commit."""
