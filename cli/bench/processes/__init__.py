"""The processes of a benchmark, and what they do."""
