"""``filesystem``: versions as files that all sides see."""
