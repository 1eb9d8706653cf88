"""The shared-memory engine: both halves on one host, no copy on the sender's side, one or none on the receiver's.

Buckets lie in anonymous memory files, whose descriptors the sender passes over a Unix socket; the same socket carries the
doorbells and the acknowledgements. So nothing has a name that could be left behind, even by ``kill -9``, and a peer's death
is an end of file at once. Only the listening socket has a name, from ``address`` to the end of ``connect``; one whose owner
was killed in between is removed by the next sender. Processes in different containers need to share nothing but the
directory of that socket.
"""

from __future__ import annotations

import os

from pydantic import Field

from ...contract.capabilities import Capabilities, Delivery
from ...contract.engine import API_VERSION
from .memfd import MemfdSegments
from .segment_engine import SegmentConfig, SegmentEngine


class ShmConfig(SegmentConfig):
    """Options of ``shm``."""

    max_shared_mib: int | None = Field(
        None,
        ge=1,
        description="Most shared memory (MiB) that one trainer process holds; what would exceed it is refused in words."
        " Without it, as much as the machine or container has.",
    )


class ShmEngine(SegmentEngine):
    """CPU memory shared between processes of one host. Receivers copy buckets out of it, or read weights where they lie."""

    api_version = API_VERSION
    config_type = ShmConfig
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}),
        same_host_only=True,
        zero_copy=True,
        views=True,
    )
    label = "shm"
    segment_kind = MemfdSegments

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        return None if hasattr(os, "memfd_create") else "this platform has no memfd_create"
