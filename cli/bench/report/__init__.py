"""The report of a benchmark: its data and tables."""
