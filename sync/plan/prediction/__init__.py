"""Predicted traffic and time of a transfer plan, for models and networks that need not exist."""
