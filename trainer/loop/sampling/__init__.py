"""Sampling: how far ahead groups begin, completions that were cut off, groups without signal, and the bias of all that."""
