"""Anonymous shared memory that other processes get as a file descriptor, and that vanishes with its last user."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import torch

from .errors import ProtocolError, StorageError


class Segment:
    """A mapped memory file. `data` is all of it as uint8, and keeps the mapping alive by itself.

    The mapping is never removed under a tensor that looks at it: the memory is given back when the last one is gone.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.data = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """New zeroed memory of at least one byte; `StorageError` when the machine has too little."""
        nbytes = max(1, nbytes)
        descriptor = os.memfd_create("weightlane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # or a later write would kill the process instead of raising
            # A receiver maps the file and may rely on its size from then on.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            return cls(descriptor, nbytes)
        except OSError as error:
            os.close(descriptor)
            raise StorageError(
                f"no shared memory for {nbytes} bytes: {os.strerror(error.errno or errno.ENOMEM)}.",
                part="shared memory",
                hint="Use smaller buckets, or give the container more memory.",
            ) from error

    @classmethod
    def adopt(cls, descriptor: int, nbytes: int) -> Segment:
        """Map a descriptor that a peer sent, and own it; `ProtocolError` when it is not a segment of `nbytes` bytes."""
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if sealed and os.fstat(descriptor).st_size == nbytes:
                return cls(descriptor, nbytes)
            problem = "it is not a sealed segment of that size"
        except (OSError, ValueError) as error:
            problem = str(error)
        os.close(descriptor)
        raise ProtocolError(f"cannot map {nbytes} bytes: {problem}.", part="shared memory")

    def offset_of(self, data: torch.Tensor) -> int | None:
        """Where contiguous `data` lies in this segment, None when it does not."""
        offset = data.data_ptr() - self.data.data_ptr()
        return offset if 0 <= offset <= self.nbytes - data.numel() else None

    def close(self) -> None:
        """Close the descriptor and let go of the mapping."""
        os.close(self.descriptor)
        self.data = torch.empty(0, dtype=torch.uint8)
