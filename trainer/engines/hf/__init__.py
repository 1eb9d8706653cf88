"""Hugging Face model directories: check them, name their tensors, read and write them."""
