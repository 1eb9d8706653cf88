"""``faulty:NAME``: the engine NAME with faults injected into its links on purpose, to test and soak the code that uses engines.

The wrapper has the wrapped engine's capabilities and keeps the contract: it raises typed errors, its delays end by the deadline,
and ``close`` from another thread ends an injected hang. Whether a bucket has a fault, and which, depends only on the seed, the
half's name, the session, the version and the bucket's index. A half injects at most one fault per session and version, so that
faults can be counted, and appends each to a log before it happens.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from pydantic import Field, create_model

from ..contract.bucket import Bucket
from ..contract.engine import CheckpointEngine, Topology
from ..errors import StorageError
from ..links import ReceiverLink, SenderLink
from ..waits import Deadline
from .faults import HINT, RECEIVER_KINDS, SENDER_KINDS, FaultKind, Faults, FaultyConfig, FaultyEngine

PREFIX = "faulty:"
"""Prefix of the wrapped engine's name."""
_LOST = "the connection was lost"


class FaultySenderLink(SenderLink):
    """A sender's link that injects faults."""

    def __init__(self, engine: CheckpointEngine, name: str, device: torch.device) -> None:
        super().__init__(engine, name, device)
        self._faults = Faults(f"faulty sender {name}", name, cast("FaultyEngine", engine).faulty_config, SENDER_KINDS)
        self._postponed: tuple[Bucket, Sequence[str], str] | None = None
        """A bucket to post after the next one, its receivers and its checksum."""
        self._posted_fewer = False
        """Whether a fault has dropped or postponed a bucket, so that the half has fewer posted buckets than its caller counts."""

    def connect(self, topology: Topology, deadline: Deadline) -> None:
        """See `SenderLink.connect`; raises `PeerLostError` if a fault refuses the connection."""
        self._faults.start_session(topology.session)
        if self._faults.refuses_connection():
            self.close()
            raise self._faults.lost("the connection was refused", ", ".join(topology.receivers))
        super().connect(topology, deadline)

    def post(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline, checksum: str = "") -> None:
        """Post `bucket` with its fault, if it has one, and then a bucket that an earlier fault postponed."""
        postponed, self._postponed = self._postponed, None
        self._post(bucket, receivers, deadline, checksum)
        if postponed is not None:
            super().post(postponed[0], postponed[1], deadline, postponed[2])

    def _post(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline, checksum: str) -> None:
        kind = self._faults.on_bucket(bucket)
        self._faults.disturb(kind, deadline, ", ".join(receivers), self.close, _LOST)
        if kind in {FaultKind.DROP, FaultKind.REORDER}:
            self._posted_fewer = True
            if kind is FaultKind.REORDER:  # a copy, because the caller may overwrite the memory soon
                self._postponed = replace(bucket, data=bucket.data.clone()), tuple(receivers), checksum
            return
        if kind is FaultKind.FLIP:
            bucket = replace(bucket, data=bucket.data.clone())
            self._faults.flip(bucket)
        elif kind is FaultKind.TRUNCATE:
            bucket = self._faults.truncated(bucket)
        super().post(bucket, receivers, deadline, checksum)
        if kind is FaultKind.DUPLICATE:
            super().post(bucket, receivers, deadline, checksum)

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """See `SenderLink.flush`; once a fault has dropped or postponed a bucket, waits for all posted buckets."""
        super().flush(deadline, 0 if self._posted_fewer else pending)

    def reclaim(self, version: int, deadline: Deadline) -> None:
        """See `SenderLink.reclaim`; may be delayed, hang or lose a receiver first."""
        kind = self._faults.on_version(version)
        self._faults.disturb(kind, deadline, "", self.close, f"a receiver of version {version} was lost")
        super().reclaim(version, deadline)

    def close(self) -> None:
        """See `SenderLink.close`."""
        self._faults.close()
        super().close()


class FaultyReceiverLink(ReceiverLink):
    """A receiver's link that injects faults."""

    def __init__(self, engine: CheckpointEngine, name: str, device: torch.device) -> None:
        super().__init__(engine, name, device)
        self._faults = Faults(
            f"faulty receiver {name}", name, cast("FaultyEngine", engine).faulty_config, RECEIVER_KINDS
        )
        self._posted: deque[tuple[Bucket, bool]] = deque()
        """Posted buckets that have not arrived, and whether to flip a bit of each when it arrives."""

    def connect(self, topology: Topology, deadline: Deadline) -> None:
        """See `ReceiverLink.connect`."""
        self._faults.start_session(topology.session)
        super().connect(topology, deadline)

    def post(self, bucket: Bucket, sender: str, deadline: Deadline) -> str:
        """See `ReceiverLink.post`; a fault may come first."""
        flips = self._meet_fault(bucket, sender, deadline)
        checksum = super().post(bucket, sender, deadline)
        self._posted.append((bucket, flips))
        return checksum

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """See `ReceiverLink.flush`; flips bits of buckets that have arrived."""
        super().flush(deadline, pending)
        while len(self._posted) > pending:
            bucket, flips = self._posted.popleft()
            if flips:
                self._faults.flip(bucket)

    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> tuple[torch.Tensor, str]:
        """See `ReceiverLink.view`; a fault may come first. A bit is flipped in a private copy: others read the memory, too."""
        bucket = Bucket(version, index, torch.empty(nbytes, dtype=torch.uint8, device="meta"), lasting=True)
        flips = self._meet_fault(bucket, sender, deadline)
        data, checksum = super().view(version, index, nbytes, sender, deadline)
        if flips:
            data = data.clone()
            self._faults.flip(replace(bucket, data=data))
        return data, checksum

    def _meet_fault(self, bucket: Bucket, sender: str, deadline: Deadline) -> bool:
        """Inject the fault of `bucket`, if it has one, and return whether one of its bits is to be flipped."""
        kind = self._faults.on_bucket(bucket)
        self._faults.disturb(kind, deadline, sender, self.close, _LOST)
        if kind is FaultKind.STORAGE:
            raise StorageError("a read failed (injected fault).", part=self._faults.part, peer=sender, hint=HINT)
        return kind is FaultKind.FLIP

    def release(self, version: int, deadline: Deadline) -> None:
        """See `ReceiverLink.release`; may be delayed, hang or lose the sender first."""
        kind = self._faults.on_version(version)
        self._faults.disturb(kind, deadline, "", self.close, f"the sender of version {version} was lost")
        super().release(version, deadline)

    def close(self) -> None:
        """See `ReceiverLink.close`."""
        self._faults.close()
        super().close()


@functools.cache
def faulty(inner: type[CheckpointEngine]) -> type[FaultyEngine]:
    """Return the engine class that wraps `inner`: it has the same capabilities, and its options contain those of `inner`."""
    options = (inner.config_type, Field(description=f"Options of {inner.__name__}."))
    return type(
        f"Faulty{inner.__name__}",
        (FaultyEngine, inner),
        {
            "__doc__": f"{inner.__name__} with injected faults.",
            "config_type": create_model(f"Faulty{inner.config_type.__name__}", __base__=FaultyConfig, inner=options),
            "link_types": {SenderLink: FaultySenderLink, ReceiverLink: FaultyReceiverLink},
        },
    )
