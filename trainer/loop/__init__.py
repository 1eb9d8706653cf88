"""The fully-async training loop."""
