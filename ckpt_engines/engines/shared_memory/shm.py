"""The ``shm`` engine: both halves on one host, no copy on the sender's side, one or none on the receiver's.

Buckets lie in anonymous memory files, whose descriptors the sender passes over a Unix socket. So no file or segment has a name
that ``kill -9`` could leave behind. Only the listening socket has a name, from ``address`` to the end of ``connect``; the next
sender removes the socket of an owner that was killed in between. Processes in different containers need to share only the
directory of that socket.
"""

from __future__ import annotations

import os

from ...contract.capabilities import Capabilities, Delivery
from .host_segments import MemfdSegmentKind
from .segment_engine import SegmentEngine


class ShmEngine(SegmentEngine):
    """CPU memory shared between processes of one host. Receivers copy buckets out of it, or read weights where they lie."""

    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}),
        same_host_only=True,
        views=True,
    )
    label = "shm"
    segment_kind = MemfdSegmentKind

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        return None if hasattr(os, "memfd_create") else "this platform has no memfd_create"
