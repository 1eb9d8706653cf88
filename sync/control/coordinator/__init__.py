"""The coordinator of a run: who takes part, the session they share, and each version from its offer to its commit."""
