"""``shm`` and ``cuda_ipc``: receivers map the sender's memory."""
