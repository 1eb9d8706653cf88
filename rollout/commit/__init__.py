"""Commits: one replica's weights are exchanged between two decode steps."""
