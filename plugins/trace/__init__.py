"""A trace of trainer, sync and generation, for ui.perfetto.dev or chrome://tracing."""
