"""The runner: what executes training, and the files that a run writes."""
