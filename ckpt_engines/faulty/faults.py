"""`Faults`: decides which faults the half of a faulty engine injects, and logs them; the kinds of faults, and their options.

The log is a file with one JSON object per line: a `FaultRecord`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..contract.bucket import Bucket
from ..contract.engine import CheckpointEngine, EngineConfig
from ..errors import ClosedError, PeerLostError, StorageError
from ..waits import Deadline


class FaultKind(StrEnum):
    """A kind of fault, with the side that injects it."""

    DROP = "drop"
    """Sender: the bucket is never sent."""
    DUPLICATE = "duplicate"
    """Sender: the bucket is sent twice."""
    REORDER = "reorder"
    """Sender: the bucket is sent after the next one."""
    FLIP = "flip"
    """Either: one bit changes, on the sender's side in a private copy, on the receiver's after receipt."""
    TRUNCATE = "truncate"
    """Sender: a shorter bucket is sent in its place."""
    DELAY = "delay"
    """Either: the call takes `FaultyConfig.delay_s` seconds longer."""
    HANG = "hang"
    """Either: the call blocks until its deadline or ``close``."""
    LOSE = "lose"
    """Either: the connection breaks, as if the peer had died."""
    REFUSE = "refuse"
    """Sender: ``connect`` fails."""
    STORAGE = "storage"
    """Receiver: a read fails."""
    EXHAUST = "exhaust"
    """Engine: an allocation fails."""


SENDER_KINDS = tuple(kind for kind in FaultKind if kind not in {FaultKind.REFUSE, FaultKind.STORAGE, FaultKind.EXHAUST})
"""Faults of a bucket that a sender posts."""
RECEIVER_KINDS = (FaultKind.FLIP, FaultKind.DELAY, FaultKind.HANG, FaultKind.LOSE, FaultKind.STORAGE)
"""Faults of a bucket that a receiver posts or views."""
NEED_BYTES = frozenset({FaultKind.FLIP, FaultKind.TRUNCATE})
"""Faults that an empty bucket cannot have."""
VERSION_KINDS = frozenset({FaultKind.DELAY, FaultKind.HANG, FaultKind.LOSE})
"""Faults of the release or reclaim of a version."""


class FaultyConfig(EngineConfig):
    """Options of ``faulty:NAME``. The config type for a particular NAME gives `inner` the type of NAME's own options."""

    inner: EngineConfig = Field(description="Options of the wrapped engine.")
    seed: int = Field(0, description="Other seeds inject other faults.")
    rate: float = Field(0.1, ge=0, le=1, description="Probability of a fault per bucket, and per connect.")
    kinds: tuple[FaultKind, ...] = Field(
        tuple(kind for kind in FaultKind if kind is not FaultKind.EXHAUST),
        min_length=1,
        description="Which faults to inject; each half takes those it can have. Without this option all but exhaust, since a"
        " program that needs memory to start would not start.",
    )
    delay_s: float = Field(0.1, ge=0, description="Length of an injected delay, in seconds.")
    log: str = Field(
        "", description="File to which every injected fault is appended as a line of JSON; empty for none."
    )

    @model_validator(mode="before")
    @classmethod
    def _inner_is_optional(cls, options: Any) -> Any:
        return {"inner": {}, **options} if isinstance(options, Mapping) else options


HINT = "This fault was injected on purpose; see checkpoint_engine.options."
NO_BUCKET = -1
"""Placeholder in the record of a fault that concerns no bucket: version and index of a fault while connecting, version of a
failed allocation, and index of a fault in the release or reclaim of a version."""


class FaultRecord(BaseModel):
    """One injected fault."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: float
    """Seconds since the epoch."""
    half: str
    """Name of the half, or ``"engine"`` for a failed allocation."""
    session: str
    version: int
    """`NO_BUCKET` for a fault while connecting or allocating."""
    index: int
    """Index of the bucket, or `NO_BUCKET` if there is none. For a failed allocation, the number of allocations before it."""
    kind: FaultKind


class Faults:
    """The faults of one half, or of an engine.

    Args:
        part: Name of the half for error messages.
        half: Name of the half in the log.
        config: Which faults to inject, and how often.
        possible: The kinds that this half can have.
    """

    def __init__(self, part: str, half: str, config: FaultyConfig, possible: Sequence[FaultKind]) -> None:
        self.part = part
        self._half = half
        self._config = config
        self._possible = [kind for kind in possible if kind in config.kinds]
        self._closed = threading.Event()
        self._session = ""
        self._faulty_versions: set[int] = set()

    def start_session(self, session: str) -> None:
        """Set the name of the session, on which faults depend, as they do on the seed."""
        self._session = session

    def refuses_connection(self) -> bool:
        """Decide, and log, whether ``connect`` fails."""
        if FaultKind.REFUSE not in self._config.kinds or not self._strikes(NO_BUCKET, NO_BUCKET):
            return False
        self._log(NO_BUCKET, NO_BUCKET, FaultKind.REFUSE)
        return True

    def on_bucket(self, bucket: Bucket) -> FaultKind | None:
        """Decide, and log, which fault `bucket` has, if any."""
        possible = [kind for kind in self._possible if bucket.nbytes or kind not in NEED_BYTES]
        return self._choose(possible, bucket.version, bucket.index)

    def on_version(self, version: int) -> FaultKind | None:
        """Decide, and log, which fault the release or reclaim of `version` has, if any."""
        return self._choose([kind for kind in self._possible if kind in VERSION_KINDS], version, NO_BUCKET)

    def on_allocation(self, number: int) -> bool:
        """Decide, and log, whether the engine's allocation of this `number` fails."""
        if not self._possible or not self._strikes(NO_BUCKET, number):
            return False
        self._log(NO_BUCKET, number, FaultKind.EXHAUST)
        return True

    def _choose(self, possible: Sequence[FaultKind], version: int, index: int) -> FaultKind | None:
        if version in self._faulty_versions or not possible or not self._strikes(version, index):
            return None
        kind = possible[self._draw("kind", version, index) % len(possible)]
        self._faulty_versions.add(version)
        self._log(version, index, kind)
        return kind

    def flip(self, bucket: Bucket) -> None:
        """Change one bit of ``bucket.data`` in place."""
        bit = self._draw("bit", bucket.version, bucket.index) % (8 * bucket.nbytes)
        bucket.data[bit // 8].bitwise_xor_(1 << bit % 8)

    def truncated(self, bucket: Bucket) -> Bucket:
        """Return `bucket` with only some of its first bytes."""
        nbytes = self._draw("size", bucket.version, bucket.index) % bucket.nbytes
        return replace(bucket, data=bucket.data[:nbytes])

    def disturb(
        self, kind: FaultKind | None, deadline: Deadline, peer: str, close: Callable[[], None], what: str
    ) -> None:
        """Delay the call, hang until the `deadline`, or lose the connection; do nothing for other kinds.

        Raises `DeadlineExceededError` after a hang, and `ClosedError` when the half is closed meanwhile. To lose the connection
        it calls `close` and raises `PeerLostError` with the message `what`.
        """
        if kind is FaultKind.LOSE:
            close()
            raise self.lost(what, peer)
        if kind in {FaultKind.DELAY, FaultKind.HANG}:
            longest_s = self._config.delay_s if kind is FaultKind.DELAY else deadline.remaining_s
            if self._closed.wait(min(longest_s, deadline.remaining_s)):
                raise ClosedError("it was closed while a call was running.", part=self.part)
            if kind is FaultKind.HANG:
                raise deadline.error("an injected hang to end", part=self.part, peer=peer, hint=HINT)

    def lost(self, what: str, peer: str) -> PeerLostError:
        """Return the error for a connection that is broken on purpose; `what` is its message."""
        return PeerLostError(f"{what} (injected fault).", part=self.part, peer=peer, hint=HINT)

    def close(self) -> None:
        """End a hang or a delay."""
        self._closed.set()

    def _strikes(self, version: int, index: int) -> bool:
        return self._draw("whether", version, index) < self._config.rate * 2**64

    def _draw(self, purpose: str, version: int, index: int) -> int:
        """Return a number below 2**64 that depends only on the arguments, the seed, the half's name and the session."""
        identity = [self._config.seed, self._half, self._session, version, index, purpose]
        return int.from_bytes(hashlib.sha256(json.dumps(identity).encode()).digest()[:8], "big")

    def _log(self, version: int, index: int, kind: FaultKind) -> None:
        if not (path := self._config.log):
            return
        record = FaultRecord(
            at=time.time(), half=self._half, session=self._session, version=version, index=index, kind=kind
        )
        try:  # a single write to a file opened for appending, so that the lines of several processes never mix
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, f"{record.model_dump_json()}\n".encode())
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            message = f"cannot write the fault log {path!r}: {error}."
            raise StorageError(message, part=self.part, hint="Set another checkpoint_engine.options.log.") from error


class FaultyEngine(CheckpointEngine):
    """Base of the engines that `faulty` makes; the other base of each is the engine that it wraps, which gets its own options."""

    def __init__(self, config: EngineConfig) -> None:
        assert isinstance(config, FaultyConfig)
        super().__init__(config.inner)
        self.faulty_config = config
        self._faults = Faults("faulty engine", "engine", config, (FaultKind.EXHAUST,))
        self._allocations = itertools.count()

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """See `CheckpointEngine.allocate`; raises `StorageError` for an injected fault."""
        if self._faults.on_allocation(next(self._allocations)):
            raise StorageError(f"no memory for {nbytes} bytes (injected fault).", part=self._faults.part, hint=HINT)
        return super().allocate(nbytes, device)
