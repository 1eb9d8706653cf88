"""``faulty:NAME``: any installed engine, with faults injected into its links on purpose.

For tests and soaks of whatever stands on top of an engine. The wrapper has the wrapped engine's capabilities and stays
inside the contract: what it raises are the typed errors, what it delays ends by the deadline, and ``close`` from another
thread ends an injected hang. Whether a bucket meets a fault, and which one, depends on nothing but the seed, the half's
name, the session, the version and the bucket's index. A half injects at most one fault per session and version, so that
faults can be counted; each is appended to a log before it strikes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from ...channels.meeting import Meeting
from ...contract.bucket import Bucket
from ...contract.engine import CheckpointEngine, EngineConfig, Topology, WeightReceiver, WeightSender
from ...deadline import Deadline
from ...errors import ClosedError, PeerLostError, ProtocolError, StorageError
from ...links.receiver_link import ReceiverLink
from ...links.sender_link import SenderLink

PREFIX = "faulty:"
"""What stands ahead of the wrapped engine's name."""
NO_BUCKET = -1
"""Version and index that the log gives to a fault while connecting; version of one while allocating; index of one that meets a
whole version."""
_HINT = "This fault was injected on purpose; see checkpoint_engine.options."


class FaultKind(StrEnum):
    """What can go wrong."""

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
    """Either: the call takes `delay_s` seconds longer."""
    HANG = "hang"
    """Either: the call blocks until its deadline or ``close``."""
    LOSE = "lose"
    """Either: the connection breaks, as if the peer had died."""
    REFUSE = "refuse"
    """Sender: ``connect`` fails."""
    STORAGE = "storage"
    """Receiver: a read fails."""
    EXHAUST = "exhaust"
    """Engine: there is no memory to allocate."""


_ELSEWHERE = frozenset({FaultKind.REFUSE, FaultKind.STORAGE, FaultKind.EXHAUST})
_OF_SENDER = tuple(kind for kind in FaultKind if kind not in _ELSEWHERE)
_OF_RECEIVER = (FaultKind.FLIP, FaultKind.DELAY, FaultKind.HANG, FaultKind.LOSE, FaultKind.STORAGE)
_NEED_BYTES = frozenset({FaultKind.FLIP, FaultKind.TRUNCATE})
_OF_NO_BUCKET = frozenset({FaultKind.DELAY, FaultKind.HANG, FaultKind.LOSE})
"""What can go wrong with a whole version: when it is released, or reclaimed."""


class FaultyConfig(EngineConfig):
    """Options of ``faulty:NAME``; in the config type of a particular one, `inner` has the type of NAME's own options."""

    inner: EngineConfig = Field(description="Options of the wrapped engine.")
    seed: int = Field(0, description="Other seeds inject other faults.")
    rate: float = Field(0.1, ge=0, le=1, description="Probability of a fault per bucket, and per connect.")
    kinds: tuple[FaultKind, ...] = Field(
        tuple(kind for kind in FaultKind if kind is not FaultKind.EXHAUST),
        min_length=1,
        description="Which faults to inject; each half takes those it can do. All but exhaust unless set: what needs memory to"
        " begin with does not start without it.",
    )
    delay_s: float = Field(0.1, ge=0, description="Length of an injected delay, in seconds.")
    log: str = Field(
        "", description="File to which every injected fault is appended as a line of JSON; empty for none."
    )

    @model_validator(mode="before")
    @classmethod
    def _inner_may_be_left_out(cls, options: Any) -> Any:
        return {"inner": {}, **options} if isinstance(options, Mapping) else options


class FaultRecord(BaseModel):
    """One injected fault, a line of the log."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: float
    """Seconds since the epoch."""
    half: str
    session: str
    version: int
    """`NO_BUCKET` for a fault while connecting or allocating."""
    index: int
    """`NO_BUCKET` for a fault that meets no bucket; while allocating, how many allocations there were before."""
    kind: FaultKind


def read_fault_log(path: str | os.PathLike[str]) -> list[FaultRecord]:
    """Every fault that was logged to `path`, oldest first; none when there is no such file.

    Raises `ProtocolError` for a line that is not a record, or `StorageError`.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {str(path)!r}: {error}.", part="fault log") from error
    try:
        return [FaultRecord.model_validate_json(line) for line in lines]
    except ValidationError as error:
        raise ProtocolError(f"{path} is not a fault log: {error.errors()[0]['msg']}.", part="fault log") from None


class _Faults:
    """The faults of one half: decides, logs, waits."""

    def __init__(self, part: str, half: str, config: FaultyConfig, possible: Sequence[FaultKind]) -> None:
        self.part = part
        self._half = half
        self._config = config
        self._possible = [kind for kind in possible if kind in config.kinds]
        self._closed = threading.Event()
        self._session = ""
        self._struck: set[int] = set()
        """Versions that have met their fault."""

    def start_session(self, session: str) -> None:
        self._session = session

    def refuses(self) -> bool:
        """Whether ``connect`` shall fail."""
        if FaultKind.REFUSE not in self._config.kinds or not self._strikes(NO_BUCKET, NO_BUCKET):
            return False
        self._log(NO_BUCKET, NO_BUCKET, FaultKind.REFUSE)
        return True

    def of(self, bucket: Bucket) -> FaultKind | None:
        """The fault that `bucket` meets, if any."""
        possible = [kind for kind in self._possible if bucket.nbytes or kind not in _NEED_BYTES]
        return self._choose(possible, bucket.version, bucket.index)

    def of_version(self, version: int) -> FaultKind | None:
        """The fault that releasing or reclaiming `version` meets, if any."""
        return self._choose([kind for kind in self._possible if kind in _OF_NO_BUCKET], version, NO_BUCKET)

    def of_allocation(self, number: int) -> FaultKind | None:
        """The fault that the engine's allocation of this `number` meets, if any."""
        if not self._possible or not self._strikes(NO_BUCKET, number):
            return None
        self._log(NO_BUCKET, number, FaultKind.EXHAUST)
        return FaultKind.EXHAUST

    def _choose(self, possible: Sequence[FaultKind], version: int, index: int) -> FaultKind | None:
        if version in self._struck or not possible or not self._strikes(version, index):
            return None
        kind = possible[self._draw("kind", version, index) % len(possible)]
        self._struck.add(version)
        self._log(version, index, kind)
        return kind

    def flip(self, bucket: Bucket) -> None:
        """Change one bit in place."""
        bit = self._draw("bit", bucket.version, bucket.index) % (8 * bucket.nbytes)
        bucket.data[bit // 8].bitwise_xor_(1 << bit % 8)

    def truncated(self, bucket: Bucket) -> Bucket:
        """A bucket with fewer of the bytes."""
        nbytes = self._draw("size", bucket.version, bucket.index) % bucket.nbytes
        return replace(bucket, data=bucket.data[:nbytes])

    def stall(self, kind: FaultKind, deadline: Deadline, peer: str) -> None:
        """Delay, or hang until the deadline."""
        seconds = deadline.remaining_s if kind is FaultKind.HANG else min(self._config.delay_s, deadline.remaining_s)
        if self._closed.wait(seconds):
            raise ClosedError("it was closed while a call was running.", part=self.part)
        if kind is FaultKind.HANG:
            raise deadline.error("an injected hang to end", part=self.part, peer=peer, hint=_HINT)

    def lost(self, what: str, peer: str) -> PeerLostError:
        """The error of a connection that was made to break."""
        return PeerLostError(f"{what} (injected fault).", part=self.part, peer=peer, hint=_HINT)

    def close(self) -> None:
        """End a hang or a delay."""
        self._closed.set()

    def _strikes(self, version: int, index: int) -> bool:
        return self._draw("whether", version, index) < self._config.rate * 2**64

    def _draw(self, purpose: str, version: int, index: int) -> int:
        """A number below 2**64 that only the arguments and this half's identity decide."""
        identity = [self._config.seed, self._half, self._session, version, index, purpose]
        return int.from_bytes(hashlib.sha256(json.dumps(identity).encode()).digest()[:8], "big")

    def _log(self, version: int, index: int, kind: FaultKind) -> None:
        if not self._config.log:
            return
        record = FaultRecord(
            at=time.time(), half=self._half, session=self._session, version=version, index=index, kind=kind
        )
        line = f"{record.model_dump_json()}\n".encode()
        try:  # one write behind the end of the file, so that the lines of several processes never mix
            descriptor = os.open(self._config.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise StorageError(
                f"cannot write the fault log {self._config.log!r}: {error}.",
                part=self.part,
                hint="Set another checkpoint_engine.options.log.",
            ) from error


class FaultySenderLink(SenderLink):
    """A sender's link that sometimes does something else than it was asked to."""

    def __init__(self, engine: CheckpointEngine, name: str, device: torch.device) -> None:
        super().__init__(engine, name, device)
        self._faults = _Faults(f"faulty sender {name}", name, cast("FaultyConfig", engine.config), _OF_SENDER)
        self._held: tuple[Bucket, Sequence[str], str] | None = None
        self._lacks = False
        """Whether fewer buckets are posted than the caller believes."""

    def connect(self, topology: Topology, deadline: Deadline) -> None:
        """Connect, or refuse to."""
        self._faults.start_session(topology.session)
        if self._faults.refuses():
            self.close()
            raise self._faults.lost("the connection was refused", ", ".join(topology.receivers))
        super().connect(topology, deadline)

    def post(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline, checksum: str = "") -> None:
        """Post what the fault makes of `bucket`, and behind it what an earlier fault kept back."""
        held, self._held = self._held, None
        self._post(bucket, receivers, deadline, checksum)
        if held is not None:
            super().post(held[0], held[1], deadline, held[2])

    def _post(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline, checksum: str) -> None:
        kind = self._faults.of(bucket)
        if kind is FaultKind.DROP:
            self._lacks = True
            return
        if kind is FaultKind.REORDER:  # the caller may overwrite the memory soon
            self._lacks = True
            self._held = replace(bucket, data=bucket.data.clone()), tuple(receivers), checksum
            return
        if kind is FaultKind.LOSE:
            self.close()
            raise self._faults.lost("the connection was lost", ", ".join(receivers))
        if kind is FaultKind.FLIP:
            bucket = replace(bucket, data=bucket.data.clone())
            self._faults.flip(bucket)
        elif kind is FaultKind.TRUNCATE:
            bucket = self._faults.truncated(bucket)
        elif kind in {FaultKind.DELAY, FaultKind.HANG}:
            self._faults.stall(kind, deadline, ", ".join(receivers))
        super().post(bucket, receivers, deadline, checksum)
        if kind is FaultKind.DUPLICATE:
            super().post(bucket, receivers, deadline, checksum)

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """See `SenderLink.flush`; waits for all once a bucket was kept back."""
        super().flush(deadline, 0 if self._lacks else pending)

    def reclaim(self, version: int, deadline: Deadline) -> None:
        """Wait for the receivers, unless a fault comes first."""
        kind = self._faults.of_version(version)
        if kind is FaultKind.LOSE:
            self.close()
            raise self._faults.lost(f"a receiver of version {version} was lost", "")
        if kind is not None:
            self._faults.stall(kind, deadline, "")
        super().reclaim(version, deadline)

    def close(self) -> None:
        """See `SenderLink.close`."""
        self._faults.close()
        super().close()


class FaultyReceiverLink(ReceiverLink):
    """A receiver's link that sometimes fails, or spoils what it received."""

    def __init__(self, engine: CheckpointEngine, name: str, device: torch.device) -> None:
        super().__init__(engine, name, device)
        self._faults = _Faults(f"faulty receiver {name}", name, cast("FaultyConfig", engine.config), _OF_RECEIVER)
        self._posted: deque[tuple[Bucket, bool]] = deque()
        """What has not arrived, and whether it is to be spoilt then."""

    def connect(self, topology: Topology, deadline: Deadline) -> None:
        """Connect."""
        self._faults.start_session(topology.session)
        super().connect(topology, deadline)

    def post(self, bucket: Bucket, sender: str, deadline: Deadline) -> str:
        """Post, unless a fault comes first."""
        flips = self._strike(bucket, sender, deadline)
        checksum = super().post(bucket, sender, deadline)
        self._posted.append((bucket, flips))
        return checksum

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Wait for what was posted, and perhaps spoil it."""
        super().flush(deadline, pending)
        while len(self._posted) > pending:
            bucket, flips = self._posted.popleft()
            if flips:
                self._faults.flip(bucket)

    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> tuple[torch.Tensor, str]:
        """View, unless a fault comes first. A bit flips in a private copy, since others look at the memory too."""
        bucket = Bucket(version, index, torch.empty(nbytes, dtype=torch.uint8, device="meta"), lasting=True)
        flips = self._strike(bucket, sender, deadline)
        data, checksum = super().view(version, index, nbytes, sender, deadline)
        if flips:
            data = data.clone()
            self._faults.flip(replace(bucket, data=data))
        return data, checksum

    def _strike(self, bucket: Bucket, sender: str, deadline: Deadline) -> bool:
        """Let the fault of `bucket` happen, if it meets one; whether it is one of its bits that is to flip."""
        kind = self._faults.of(bucket)
        if kind is FaultKind.LOSE:
            self.close()
            raise self._faults.lost("the connection was lost", sender)
        if kind is FaultKind.STORAGE:
            raise StorageError("a read failed (injected fault).", part=self._faults.part, peer=sender, hint=_HINT)
        if kind in {FaultKind.DELAY, FaultKind.HANG}:
            self._faults.stall(kind, deadline, sender)
        return kind is FaultKind.FLIP

    def release(self, version: int, deadline: Deadline) -> None:
        """Release, unless a fault comes first."""
        kind = self._faults.of_version(version)
        if kind is FaultKind.LOSE:
            self.close()
            raise self._faults.lost(f"the sender of version {version} was lost", "")
        if kind is not None:
            self._faults.stall(kind, deadline, "")
        super().release(version, deadline)

    def close(self) -> None:
        """See `ReceiverLink.close`."""
        self._faults.close()
        super().close()


class FaultyEngine(CheckpointEngine):
    """Base of the wrappers that `faulty` makes; a subclass names the wrapped engine's class."""

    inner_class: ClassVar[type[CheckpointEngine]]
    link_types = FaultySenderLink, FaultyReceiverLink

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._config = cast("FaultyConfig", config)
        self._inner = self.inner_class(self._config.inner)
        self._faults = _Faults("faulty engine", "engine", self._config, (FaultKind.EXHAUST,))
        self._allocations = itertools.count()

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """The wrapped engine's."""
        return cls.inner_class.unavailable_reason()

    def check(self, deadline: Deadline) -> None:
        """See `CheckpointEngine.check`."""
        self._inner.check(deadline)

    def meeting(self, name: str) -> Meeting:
        """The wrapped engine's."""
        return self._inner.meeting(name)

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory of the wrapped engine, unless a fault comes first."""
        if self._faults.of_allocation(next(self._allocations)):
            raise StorageError(f"no memory for {nbytes} bytes (injected fault).", part=self._faults.part, hint=_HINT)
        return self._inner.allocate(nbytes, device)

    def free(self, memory: torch.Tensor) -> None:
        """See `CheckpointEngine.free`."""
        self._inner.free(memory)

    def make_sender(self, name: str, device: torch.device) -> WeightSender:
        """The wrapped engine's."""
        return self._inner.make_sender(name, device)

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:
        """The wrapped engine's."""
        return self._inner.make_receiver(name, device)


@functools.cache
def faulty(inner: type[CheckpointEngine]) -> type[FaultyEngine]:
    """The engine class that wraps `inner`: same capabilities, and options that hold those of `inner`."""
    options = (inner.config_type, Field(description=f"Options of {inner.__name__}."))
    return type(
        f"Faulty{inner.__name__}",
        (FaultyEngine,),
        {
            "__doc__": f"{inner.__name__} with injected faults.",
            "inner_class": inner,
            "api_version": inner.api_version,
            "capabilities": inner.capabilities,
            "config_type": create_model(f"Faulty{inner.config_type.__name__}", __base__=FaultyConfig, inner=options),
        },
    )
