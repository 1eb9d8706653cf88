"""The hop for plain torchrun programs: a publisher that every trainer rank calls in step, without an event loop of its own."""
