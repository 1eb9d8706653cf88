"""Reports of transfer plans: of a run's ranks, and of the ranks of known models in common parallel layouts."""
