"""Low-rank adapters of a model's linear layers: their parts on a rank, their training, and their files."""
