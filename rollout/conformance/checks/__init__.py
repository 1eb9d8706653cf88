"""The checks of the suite for rollout engines, by what they look at."""
