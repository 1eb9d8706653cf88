"""The shared-memory engine: both halves on one host, no copy on the sender's side, one on the receiver's.

The sender keeps buckets in anonymous memory files and passes their descriptors over a Unix socket; the same socket
carries the doorbells and the acknowledgements. So nothing has a name that could be left behind, even by ``kill -9``,
and a peer's death is an end of file at once. Only the listening socket has a name, from ``address`` to the end of
``connect``; one whose owner was killed in between is removed by the next sender. Processes in different containers need
to share nothing but the directory of that socket.
"""

from __future__ import annotations

import os
from typing import cast

from pydantic import Field

from ._local_socket import LocalSocketConfig
from ._memfd import MemfdSegments
from ._segments import SegmentReceiver, SegmentSender
from .contract import API_VERSION, Capabilities, CheckpointEngine, Delivery, WeightReceiver, WeightSender


class ShmConfig(LocalSocketConfig):
    """Options of ``shm``."""

    max_shared_mib: int = Field(
        8192,
        ge=1,
        description="Most shared memory (MiB) that one sender holds; a bucket that would exceed it is refused in words.",
    )


class ShmEngine(CheckpointEngine):
    """CPU memory shared between processes of one host."""

    api_version = API_VERSION
    config_type = ShmConfig
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}),
        same_host_only=True,
        zero_copy=True,
    )

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        return None if hasattr(os, "memfd_create") else "this platform has no memfd_create"

    def make_sender(self, name: str) -> WeightSender:
        """See `CheckpointEngine.make_sender`."""
        config = cast("ShmConfig", self.config)
        return SegmentSender(
            f"shm sender {name}",
            MemfdSegments(),
            socket_dir=config.socket_dir,
            limit_bytes=config.max_shared_mib << 20,
        )

    def make_receiver(self, name: str) -> WeightReceiver:
        """See `CheckpointEngine.make_receiver`."""
        config = cast("ShmConfig", self.config)
        return SegmentReceiver(name, f"shm receiver {name}", MemfdSegments(), socket_dir=config.socket_dir)
