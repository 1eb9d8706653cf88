"""What a benchmark found, as it stands in its JSON: times in seconds, sizes in bytes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Spread(_Model):
    """A figure over all measured rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Self:
        """Of at least one value."""
        return cls(median=statistics.median(values), min=min(values), max=max(values))


class Machine(_Model):
    """Where it was measured."""

    cpu: str
    """Model name; empty where the system does not tell."""
    cores: int
    """That this process may use."""
    memory_bytes: int
    """Of the machine or the container, 0 where unknown."""
    gpu: str = ""
    """Name of the one that was measured; empty where none was."""
    system: str
    python: str
    torch: str
    weightlane: str


class Setup(_Model):
    """What was measured."""

    date: str
    """ISO, UTC."""
    model: str
    device: str = "cpu"
    """Where parameters lay."""
    tensors: int
    payload_bytes: int
    receivers: int
    rounds: int
    """Measured ones; one round before them is left out."""
    seed: int
    threads: int
    """Of torch, in every process."""
    bucket_bytes: int


class Limits(_Model):
    """What no transport on this machine can beat."""

    memcpy_s: Spread
    """One process copies the payload, once, memory warm."""
    memcpy_all_receivers_s: Spread
    """Every receiver does so at the same time; the slowest one."""
    copy_in_then_out_s: Spread
    """The sender copies into shared memory; then every receiver copies out at the same time."""


class Blocking(_Model):
    """The way that stops both sides: one bucket after the other is filled, sent by gloo, and emptied into live parameters."""

    trainer_blocked_s: Spread
    rollout_blocked_s: Spread
    latency_s: Spread


class Phases(_Model):
    """Where the latency went: these add up to it.

    What is done beside something longer takes no time here: checksums of a bucket, for example, that are made while another
    one travels.
    """

    export: Spread
    """`publish` until the snapshot is complete."""
    pack: Spread
    """Until the engine gets the first bucket: the manifest is accepted everywhere, the bucket filled, and its checksum taken."""
    transfer: Spread
    """Until the engine has sent the last bucket."""
    stage: Spread
    """Until the last receiver has everything, each bucket checked."""
    verify: Spread
    """Until the first copy of a commit begins: every receiver has said that it is complete, and knows where things lie."""
    commit: Spread
    """Until the last receiver serves the version."""


PHASES = tuple(Phases.model_fields)
"""Their names, in order."""


class ExtraBytes(_Model):
    """Most memory that a side took beyond its parameters, measured over the first versions; see `memory`."""

    trainer: int
    rollout: int
    """Of the receiver that took most."""


class Slowdown(_Model):
    """Steps per second while versions follow each other without a pause, as a share of those without any."""

    trainer: float
    """A loop of small matrix products in the sender."""
    decode: float
    """A loop of matrix-vector products, mean over the receivers."""


class Row(_Model):
    """One engine with one codec and one level of integrity."""

    engine: str
    codec: str
    integrity: str
    density: float
    """Share of the elements that changed from the version before."""
    payload_bytes: int
    """Of all tensors."""
    wire_bytes: int
    """That the sender handed to the engine for a version, checksums included; median."""
    trainer_blocked_s: Spread
    """`publish` and `fence`, with a step between them that is longer than the snapshot."""
    trainer_blocked_without_step_s: Spread
    """The same with nothing between them."""
    rollout_blocked_s: Spread
    """Copying the staged version over the live parameters, slowest receiver."""
    latency_s: Spread
    """`publish` until the last receiver has committed."""
    raw_transport_s: Spread | None
    """The bare transport in the same rounds, from the sender's memory into the receivers'; null where there is none."""
    phases: Phases
    extra_bytes: ExtraBytes
    slowdown: Slowdown | None
    """Null unless asked for."""
    rounds: int
    verified: bool
    """Every receiver's parameters were those of the sender, bit for bit, after every version."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.engine} {self.codec} {self.integrity}"


class BenchReport(_Model):
    """A run of ``weightlane bench``."""

    machine: Machine
    setup: Setup
    limits: Limits
    blocking: Blocking
    rows: list[Row]
    unavailable: dict[str, str] = Field(default_factory=dict)
    """Engines that were asked for and cannot run here, with the reason."""
    notes: list[str] = Field(default_factory=list)
    """What a reader should know before believing the figures."""

    @property
    def verified(self) -> bool:
        """Whether every row is."""
        return all(row.verified for row in self.rows)

    def limit_s(self, row: Row) -> float:
        """The latency that `row` is held against (median): its bare transport, and a copy more where it takes one.

        Shared memory is copied out of straight into the parameters, and so is a file in the page cache; what gloo brings has to
        be copied once more. An engine that has no bare form is held against a copy in and a copy out.
        """
        if row.raw_transport_s is None:
            return self.limits.copy_in_then_out_s.median
        extra = self.limits.memcpy_all_receivers_s.median if row.engine == "gloo" else 0.0
        return row.raw_transport_s.median + extra
