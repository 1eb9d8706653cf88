"""Trainer ranks as processes, placed by Ray."""
