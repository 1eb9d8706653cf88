"""The interface of job queues, and the queue in an object store."""
