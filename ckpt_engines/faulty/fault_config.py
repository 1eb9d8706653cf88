"""Kinds of injected faults, and the options of ``faulty:NAME``."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field, model_validator

from ..contract.engine import EngineConfig


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
