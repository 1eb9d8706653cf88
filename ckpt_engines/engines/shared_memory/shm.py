"""The ``shm`` engine: both halves on one host, no copy on the sender's side, one or none on the receiver's.

Buckets lie in anonymous memory files, whose descriptors the sender passes over a Unix socket. So no file or segment has a name
that ``kill -9`` could leave behind. Only the listening socket has a name, from ``address`` to the end of ``connect``; the next
sender removes the socket of an owner that was killed in between. Processes in different containers need to share only the
directory of that socket.
"""

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

from ...contract.capabilities import Capabilities, Delivery
from ...errors import ProtocolError, StorageError
from ...runtime.devices import HOST, runtime_of
from ...runtime.process_memory import available_memory_bytes
from .segment_engine import SegmentEngine
from .segments import Segment, SegmentArena, SegmentMapping, close_descriptors

_PART = "shared memory"
_F_SEAL_FUTURE_WRITE = 0x10
"""From <linux/fcntl.h>; Linux 5.1."""
_MADV_POPULATE_READ = 22
"""From <asm-generic/mman-common.h>; Linux 5.14."""
_libc = ctypes.CDLL(None, use_errno=True)


class MemfdSegment(Segment):
    """A memory file of zeros, `nbytes` long, at least 1.

    The mapping exists while a tensor refers to it. The memory is freed when the last such tensor is gone, here and in every
    process that maps the file. Raises `StorageError` when the machine or container has too little memory.
    """

    def __init__(self, nbytes: int) -> None:
        available = available_memory_bytes()
        if available is not None and nbytes > available:  # the kernel would not refuse but kill
            raise _no_memory(nbytes, f"only {available >> 20} MiB are left on this machine or in this container")
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
        with contextlib.suppress(OSError):  # an old kernel cannot forbid receivers to write, and none does
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)

    def describe(self) -> tuple[Mapping[str, Any], Sequence[int]]:
        """See `Segment.describe`."""
        return {}, [self.descriptor]

    def retire(self) -> None:
        """See `Segment.retire`."""
        os.close(self.descriptor)
        self.data = torch.empty(0, dtype=torch.uint8)


class MemfdMapping(SegmentMapping):
    """A sender's memory file, mapped read-only: a process that writes to it is killed, and changes nothing for the others.

    Closes `descriptor` in any case: the mapping no longer needs it. The mapping stays registered with `device`, to which buckets
    are copied, while it exists. Raises `ProtocolError` when the file is not a segment of `nbytes`.
    """

    def __init__(self, descriptor: int, nbytes: int, device: torch.device = HOST) -> None:
        self.nbytes = nbytes
        problem = "the file has another size, or is not sealed against shrinking"
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
        """See `SegmentMapping.start_copy`. The copy is done when this returns."""
        into.copy_(self.view(offset, into.numel()))

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """See `SegmentMapping.view`."""
        return self.data[offset : offset + nbytes]

    def close(self) -> None:
        """See `SegmentMapping.close`."""
        self.data = torch.empty(0, dtype=torch.uint8)


def _populate(data: torch.Tensor) -> None:
    """Cause the page faults now, while a bucket is staged, and not when its version is committed.

    Mapping with ``MAP_POPULATE`` would hold the interpreter's lock meanwhile: half a second for 512 MiB, in which no other
    thread of the process runs, vLLM's worker included. An older kernel does nothing here.
    """
    _libc.madvise(ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel()), _MADV_POPULATE_READ)


def _read_only(pages: mmap.mmap, device: torch.device) -> torch.Tensor:
    """Return the pages as uint8, registered with `device` until the last tensor that refers to them is gone.

    torch has no read-only tensors and warns of read-only buffers, so the pages go through a ctypes array, which hides this.
    """
    address = np.frombuffer(pages, dtype=np.uint8).ctypes.data
    array = (ctypes.c_ubyte * len(pages)).from_address(address)
    array.pages = pages  # type: ignore[attr-defined] # kept by the tensor through the array
    runtime_of(device).register_while_used(array, address, len(pages), read_only=True)
    return torch.frombuffer(array, dtype=torch.uint8)


class MemfdArena(SegmentArena):
    """Makes memory files, and maps those whose descriptor a sender passed."""

    def create(self, nbytes: int, device: torch.device) -> MemfdSegment:  # noqa: ARG002
        """See `SegmentArena.create`. A segment is host memory, whatever device its buckets come from."""
        return MemfdSegment(max(1, nbytes))

    def map_segment(
        self,
        nbytes: int,
        description: Mapping[str, Any],  # noqa: ARG002 - the descriptor is enough
        descriptors: Sequence[int],
        device: torch.device,
    ) -> MemfdMapping:
        """See `SegmentArena.map_segment`."""
        if len(descriptors) == 1:
            return MemfdMapping(descriptors[0], nbytes, device)
        close_descriptors(descriptors)
        raise ProtocolError(f"a segment has {len(descriptors)} descriptors instead of one.", part=_PART)


def _no_memory(nbytes: int, why: str) -> StorageError:
    return StorageError(
        f"no shared memory for {nbytes / 2**20:.1f} MiB: {why}.",
        part=_PART,
        hint="Use smaller buckets, or give the container more memory.",
    )


class ShmEngine(SegmentEngine):
    """CPU memory shared between processes of one host. Receivers copy buckets out of it, or read weights where they lie."""

    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}),
        same_host_only=True,
        views=True,
    )
    label = "shm"
    arena_type = MemfdArena

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        return None if hasattr(os, "memfd_create") else "this platform has no memfd_create"
