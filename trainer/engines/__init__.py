"""Training engines: each holds a model, sharded over trainer ranks, and changes its weights."""
