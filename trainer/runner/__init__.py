"""The runner, which executes training jobs, and the files that a run writes."""
