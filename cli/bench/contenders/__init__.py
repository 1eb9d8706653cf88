"""The contenders of a benchmark: weightlane's rows, and the references they are compared with."""
