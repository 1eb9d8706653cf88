"""The coordinator of a run: its participants, their session, and each version from its offer to its commit."""
