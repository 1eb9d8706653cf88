"""The sending side: from the live shards of a trainer rank to buckets in the engine."""
