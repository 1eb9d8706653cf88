"""Authenticated control connections between one sender and its receivers."""
