"""What a benchmark found: JSON, table and plot."""
