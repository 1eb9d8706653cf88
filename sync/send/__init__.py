"""Sending weight versions from a trainer rank.

From `Publisher.publish` to the engine, a bucket passes four steps:

1. **Snapshot** (`snapshot`): the snapshot thread copies the rank's shards into memory of the engine, in the wire
   dtype. The fence lets the optimizer change a parameter as soon as it was read.
2. **Bucket source** (`pipeline`): the send thread takes one bucket after another, as soon as the snapshot has its bytes. A
   bucket is a view of the snapshot, or packed from it. For an engine that stores versions, rank 0 gathers it from all ranks
   (`ShardGather`).
3. **Send pipeline** (`pipeline`): the send thread checksums the bucket, while the pipeline's thread sends earlier ones.
4. **Sender link** (`weightlane.ckpt_engines.links`): the pipeline's thread posts the bucket to the receivers.

A `PublicationQueue` chooses the next `Publication` for steps 1 and 2, which is offered before step 2. A `SendSession` holds the
pipeline and links of one session; a `SendingRank` holds what outlives sessions.
"""
