"""Layouts, and the slices that ranks need, computed before a replica exists: for plans and reports."""
