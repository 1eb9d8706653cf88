"""Training engines: what holds the model and changes its weights."""
