"""The sync for plain torchrun programs: a publisher that all trainer ranks call collectively, without an event loop."""
