"""``fsdp2``: PyTorch FSDP2 over any Hugging Face causal language model."""
