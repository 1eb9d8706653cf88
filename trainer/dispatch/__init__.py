"""Dispatch: roles of a training algorithm (policy, critic, reference) on groups of ranks, and calls to them."""
