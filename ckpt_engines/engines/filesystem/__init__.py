"""``filesystem``: versions as files in a directory that senders and receivers share."""
