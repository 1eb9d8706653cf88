"""The tensors that a benchmark carries."""
