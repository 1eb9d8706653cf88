"""Layouts learned by watching a model load tensors that have no data."""
