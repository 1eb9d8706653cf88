"""vLLM's own loading of checkpoints, and the tensors it derives."""
