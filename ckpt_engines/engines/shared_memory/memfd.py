"""Anonymous shared memory that other processes get as a file descriptor, and that vanishes with its last user."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import ProtocolError, StorageError
from ...runtime.available_memory import available_memory_bytes
from ...runtime.devices import HOST, runtime_of
from .segments import MappedSegment, OwnedSegment, SegmentKind, close_descriptors

_PART = "shared memory"
_F_SEAL_FUTURE_WRITE = 0x10
"""From <linux/fcntl.h>; Linux 5.1."""
_MADV_POPULATE_READ = 22
"""From <asm-generic/mman-common.h>; Linux 5.14."""
_libc = ctypes.CDLL(None, use_errno=True)


class MemfdSegment(OwnedSegment):
    """A memory file. `data` is all of it as uint8, and keeps the mapping alive by itself.

    The mapping is never removed under a tensor that looks at it: the memory is given back when the last one is gone, here and
    in every process that maps it.

    Args:
        nbytes: Its size, at least 1. It is all zeros.

    Raises:
        StorageError: The machine or container has too little memory.
    """

    def __init__(self, nbytes: int) -> None:
        room = available_memory_bytes()
        if room is not None and nbytes > room:  # the kernel would not refuse but kill
            raise _no_memory(nbytes, f"only {room >> 20} MiB are left on this machine or in this container")
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("weightlane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Without it a later write would kill the process instead of raising. It touches every page, too.
            os.posix_fallocate(self.descriptor, 0, nbytes)
            # A receiver maps the file and may rely on its size from then on.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            self.data = torch.frombuffer(mmap.mmap(self.descriptor, nbytes), dtype=torch.uint8)
        except OSError as error:
            os.close(self.descriptor)
            raise _no_memory(nbytes, os.strerror(error.errno or errno.ENOMEM)) from error
        with contextlib.suppress(OSError):  # an old kernel: then it is only that nobody writes
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)

    def describe(self) -> tuple[Mapping[str, Any], Sequence[int]]:
        """See `OwnedSegment.describe`."""
        return {}, [self.descriptor]

    def retire(self) -> None:
        """See `OwnedSegment.retire`."""
        os.close(self.descriptor)
        self.data = torch.empty(0, dtype=torch.uint8)


class MappedFile(MappedSegment):
    """A peer's memory file, mapped to be read: who writes into what it views ends there, and spoils nothing for others.

    Args:
        descriptor: Of the file. It is closed in any case; the mapping needs it no more.
        nbytes: How large the file must be.
        device: Where it is copied to: an accelerator gets to know the mapping, for as long as there is one.

    Raises:
        ProtocolError: It is not a segment of that size.
    """

    def __init__(self, descriptor: int, nbytes: int, device: torch.device = HOST) -> None:
        self.nbytes = nbytes
        problem = "it is not a sealed segment of that size"
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if sealed and os.fstat(descriptor).st_size == nbytes:
                pages = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
                self.data = _read_only(pages, device)
                _populate(self.data)
                return
        except (OSError, ValueError) as error:
            problem = str(error)
        finally:
            os.close(descriptor)
        raise ProtocolError(f"cannot map {nbytes} bytes: {problem}.", part=_PART)

    def start_copy(self, offset: int, into: torch.Tensor, after: Any) -> None:  # noqa: ARG002
        """See `MappedSegment.start_copy`: memory is memory, so there is nothing to wait for."""
        into.copy_(self.view(offset, into.numel()))

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """See `MappedSegment.view`."""
        return self.data[offset : offset + nbytes]

    def close(self) -> None:
        """See `MappedSegment.close`."""
        self.data = torch.empty(0, dtype=torch.uint8)


def _populate(data: torch.Tensor) -> None:
    """Have page faults come now, while a bucket is staged, and not when its version is committed.

    Mapping with ``MAP_POPULATE`` would hold the interpreter's lock meanwhile: half a second for 512 MiB, in which nothing else
    of the process gets on, vLLM's worker included. An older kernel leaves it at that.
    """
    _libc.madvise(ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel()), _MADV_POPULATE_READ)


def _read_only(pages: mmap.mmap, device: torch.device) -> torch.Tensor:
    """The pages as uint8. torch has no read-only tensors, and warns of a buffer that is: this one does not tell.

    `device` knows them until the last tensor that looks at them is gone.
    """
    address = np.frombuffer(pages, dtype=np.uint8).ctypes.data
    array = (ctypes.c_ubyte * len(pages)).from_address(address)
    array.pages = pages  # type: ignore[attr-defined] # which the tensor keeps through the array
    runtime_of(device).register_while_used(array, address, len(pages), read_only=True)
    return torch.frombuffer(array, dtype=torch.uint8)


class MemfdSegments(SegmentKind):
    """Segments in memory files; the receiver maps the sender's descriptor."""

    def create(self, nbytes: int, device: torch.device) -> MemfdSegment:  # noqa: ARG002
        """See `SegmentKind.create`. Buckets on other devices are copied here."""
        return MemfdSegment(max(1, nbytes))

    def adopt(
        self,
        nbytes: int,
        description: Mapping[str, Any],  # noqa: ARG002 - the descriptor says it all
        descriptors: Sequence[int],
        device: torch.device,
    ) -> MappedFile:
        """See `SegmentKind.adopt`."""
        if len(descriptors) == 1:
            return MappedFile(descriptors[0], nbytes, device)
        close_descriptors(descriptors)
        raise ProtocolError(f"a segment came with {len(descriptors)} descriptors instead of one.", part=_PART)


def _no_memory(nbytes: int, why: str) -> StorageError:
    return StorageError(
        f"no shared memory for {nbytes / 2**20:.1f} MiB: {why}.",
        part=_PART,
        hint="Use smaller buckets, or give the container more memory.",
    )
