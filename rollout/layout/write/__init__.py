"""Versions written into live parameters by precomputed copies."""
