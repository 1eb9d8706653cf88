"""The tensors that a benchmark sends."""
