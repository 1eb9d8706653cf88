"""The built-in checkpoint engines: shared memory, torch.distributed, files, and one that breaks on purpose for tests."""
