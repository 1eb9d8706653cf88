"""Objectives: losses over per-token log-probabilities, and the advantages they use."""
