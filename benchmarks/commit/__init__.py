"""Commits into real vLLM: what versions cost while it decodes, beside its own reload."""
