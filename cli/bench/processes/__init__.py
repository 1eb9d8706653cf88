"""The processes of a benchmark, and the methods that they run."""
