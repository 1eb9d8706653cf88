"""The control plane of a run: participants meet, exchange messages, open sessions, and learn what became of each version."""
