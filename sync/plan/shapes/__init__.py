"""Shapes of known models and common parallel layouts, for plans without a run."""
