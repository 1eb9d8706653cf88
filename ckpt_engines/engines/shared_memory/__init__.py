"""``shm`` and ``cuda_ipc``: receivers map the sender's memory.

A *segment* is one block of memory of the sender's process that receivers on the same host can map: an anonymous memory file for
``shm``, an allocation of the CUDA driver for ``cuda_ipc``. A bucket in a segment stays where it lies; any other bucket is first
copied to a segment. Sender and receiver exchange JSON messages over a Unix socket, on which a peer's death is an end of file:

1. The sender announces each bucket (`toolkit.announce`). In addition to version, index and size, the announcement has

   - ``segment`` and ``offset``: the number of the segment, and the position of the bucket in it.
   - ``described``: how to map the segment, in its first announcement to this receiver. The segment's file descriptors, if it
     has any, follow the announcement with a single byte.
   - ``retired``: numbers of segments that the receiver unmaps, because the sender no longer uses them.
   - ``lasting``: true if the receiver may view the bucket where it lies instead of copying it.

2. The receiver copies the bucket, or views it, and then acknowledges it (`toolkit.acknowledge`), with ``viewed`` if it views it.
   Acknowledgements are sent in the order of the announcements. The sender reuses the memory of a bucket when all receivers have
   acknowledged it.

3. A receiver that no longer views a version sends ``{"released": version}``, at any time between its acknowledgements. The
   sender reuses the memory of a lasting bucket when no receiver views it and none may still start to.
"""
