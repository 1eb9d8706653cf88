"""Hugging Face model directories: checked, named, and written."""
