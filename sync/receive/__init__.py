"""The receiving side: from an engine's receiver links to staged memory.

The `Subscriber` accepts a version on its control thread and hands a `StageRequest` to its staging thread, which calls the
`VersionReceiver`. From there every bucket passes four steps:

1. *Link*: the engine delivers the bucket through a `Source` of the `ReceiveSession`.
2. *Transfer*: the `VersionReceiver` posts buckets ahead, waits for the oldest, verifies its checksum, and relays it to the ranks
   that need it from here. Every link has its own thread.
3. *Sink*: a `BucketSink` provides the memory for the bucket and takes the verified bucket: staging memory, a view of the sender's
   memory, the decoder of a delta, or a `LiveStream` into the live weights.
4. *Staged version*: `Staging` keeps the version, or a prepared delta, until its commit, and the version that serves until the
   next one.

`read_version` reads a stored version without taking part in a run.
"""
