"""The control plane of a run: participants join, exchange messages, open sessions, and learn the outcome of each version."""
