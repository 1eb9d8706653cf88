"""Layout maps: where each element of a checkpoint lands in a rank's live parameters, as plain data."""
