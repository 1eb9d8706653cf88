"""The processes in which the suite runs the ranks of a training engine."""
