"""Anonymous shared memory that other processes get as a file descriptor, and that vanishes with its last user."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ._memory import available_memory_bytes
from ._segments import MappedSegment, OwnedSegment, SegmentKind
from .errors import ProtocolError, StorageError

_PART = "shared memory"


class Segment(OwnedSegment, MappedSegment):
    """A mapped memory file. `data` is all of it as uint8, and keeps the mapping alive by itself.

    The mapping is never removed under a tensor that looks at it: the memory is given back when the last one is gone.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.data = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """New zeroed memory of at least one byte; `StorageError` when the machine or container has too little."""
        nbytes = max(1, nbytes)
        room = available_memory_bytes()
        if room is not None and nbytes > room:  # the kernel would not refuse but kill
            raise _no_memory(nbytes, f"only {room >> 20} MiB are left on this machine or in this container")
        descriptor = os.memfd_create("weightlane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # or a later write would kill the process instead of raising
            # A receiver maps the file and may rely on its size from then on.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            return cls(descriptor, nbytes)
        except OSError as error:
            os.close(descriptor)
            raise _no_memory(nbytes, os.strerror(error.errno or errno.ENOMEM)) from error

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
        raise ProtocolError(f"cannot map {nbytes} bytes: {problem}.", part=_PART)

    def describe(self) -> tuple[Mapping[str, Any], Sequence[int]]:
        """See `OwnedSegment.describe`."""
        return {}, [self.descriptor]

    def copy_out(self, offset: int, into: torch.Tensor, wait: Callable[[Callable[[], bool]], None]) -> None:  # noqa: ARG002
        """See `MappedSegment.copy_out`: memory is memory, so there is nothing to wait for."""
        into.copy_(self.data[offset : offset + into.numel()])

    def close(self) -> None:
        """Close the descriptor and let go of the mapping."""
        os.close(self.descriptor)
        self.data = torch.empty(0, dtype=torch.uint8)


class MemfdSegments(SegmentKind):
    """Segments in memory files; the receiver maps the sender's descriptor."""

    def create(self, nbytes: int) -> Segment:
        """See `SegmentKind.create`."""
        return Segment.create(nbytes)

    def adopt(
        self,
        nbytes: int,
        description: Mapping[str, Any],  # noqa: ARG002 - the descriptor says it all
        descriptors: Sequence[int],
        device: torch.device,  # noqa: ARG002
    ) -> Segment:
        """See `SegmentKind.adopt`."""
        if len(descriptors) == 1:
            return Segment.adopt(descriptors[0], nbytes)
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        raise ProtocolError(f"a segment came with {len(descriptors)} descriptors instead of one.", part=_PART)


def _no_memory(nbytes: int, why: str) -> StorageError:
    return StorageError(
        f"no shared memory for {nbytes / 2**20:.1f} MiB: {why}.",
        part=_PART,
        hint="Use smaller buckets, or give the container more memory.",
    )
