"""Layout maps: where each checkpoint element lands in a rank's live parameters, and which slices a rank therefore needs."""
