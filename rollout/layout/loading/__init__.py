"""vLLM's own loading: which models it takes versions for, what a version consists of, and reloads of a live model."""
