"""The receiving side: from buckets in the engine to a verified version that waits for its commit."""
