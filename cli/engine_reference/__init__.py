"""The engine reference of the documentation, made from what engines declare."""
