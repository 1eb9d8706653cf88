"""Agents: programs that know only OpenAI's API generate a run's episodes over an endpoint of the run."""
