"""The report of a benchmark: its data, tables and plot."""
