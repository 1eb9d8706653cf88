"""The report of a benchmark as it is written to JSON. Times are in seconds, sizes in bytes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from .latency_fit import LatencyFit


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Spread(_Model):
    """Median, minimum and maximum of a figure over all measured rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Self:
        """Make the spread of one or more values."""
        return cls(median=statistics.median(values), min=min(values), max=max(values))


class Machine(_Model):
    """The machine that was measured."""

    cpu: str
    """Model name; empty if the system does not report it."""
    cores: int
    """CPU cores that this process may use."""
    memory_bytes: int
    """Memory of the machine or the container; 0 if unknown."""
    gpu: str = ""
    """Name of the measured GPU; empty if none was measured."""
    system: str
    python: str
    torch: str
    weightlane: str


class Setup(_Model):
    """The settings of the run."""

    date: str
    """ISO date, in UTC."""
    model: str
    device: str = "cpu"
    """The parameters' device."""
    tensors: int
    payload_bytes: int
    receivers: int
    rounds: int
    """Measured rounds. One round before them warms up."""
    seed: int
    threads: int
    """Threads of torch in every process."""
    bucket_bytes: int


class Limits(_Model):
    """Times that no transport on this machine can beat."""

    memcpy_s: Spread
    """One process copies the payload once, in memory that it has used before."""
    memcpy_all_receivers_s: Spread
    """Every receiver copies the payload at the same time; the slowest one."""
    copy_in_then_out_s: Spread
    """The sender copies into shared memory; then every receiver copies out at the same time."""


class Blocking(_Model):
    """A blocking sync: both sides stop while each bucket is filled, sent by gloo, and copied into live parameters."""

    trainer_blocked_s: Spread
    rollout_blocked_s: Spread
    latency_s: Spread


class Phases(_Model):
    """The phases of the latency, which add up to it.

    Work that overlaps something longer takes no time here. An example is the checksum of a bucket that is computed while another
    bucket is sent.
    """

    export: Spread
    """From the call of `publish` until the snapshot is complete."""
    pack: Spread
    """Until the engine gets the first bucket: receivers accept the manifest, and the bucket is filled and checksummed."""
    transfer: Spread
    """Until the engine has sent the last bucket."""
    stage: Spread
    """Until the last receiver has verified every bucket."""
    verify: Spread
    """Until the first copy of a commit starts: every receiver has reported the version and located its tensors."""
    commit: Spread
    """Until the last receiver serves the version."""


PHASES = tuple(Phases.model_fields)
"""Names of the phases, in order."""


class ExtraBytes(_Model):
    """Peak memory of each side beyond its parameters, measured over the first versions: see `peak_memory`."""

    trainer: int
    rollout: int
    """Bytes of the receiver that took most."""


class Slowdown(_Model):
    """Steps per second during versions that follow each other without a pause, as a share of those without any version."""

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
    """Share of the elements that differ from the previous version."""
    payload_bytes: int
    """Bytes of all tensors."""
    wire_bytes: int
    """Bytes that the sender gave to the engine for a version, checksums included; median."""
    trainer_blocked_s: Spread
    """Time in `publish` and `fence`, with a step between them that is longer than the snapshot."""
    trainer_blocked_without_step_s: Spread
    """Time in `publish` and `fence` with nothing between them."""
    rollout_blocked_s: Spread
    """Time in which the slowest receiver copies the staged version over the live parameters."""
    latency_s: Spread
    """From the call of `publish` until the last receiver has committed."""
    raw_transport_s: Spread | None
    """The bare transport in the same rounds, from the sender's memory into the receivers'; null if the engine has none."""
    phases: Phases
    extra_bytes: ExtraBytes
    slowdown: Slowdown | None
    """Null unless the run measured it."""
    fit: LatencyFit | None = None
    """Null unless the run measured parts of the model, too."""
    rounds: int
    verified: bool
    """Whether every receiver's parameters equalled those of the sender, bit for bit, after every version."""

    @property
    def name(self) -> str:
        """The row's name in tables."""
        return f"{self.engine} {self.codec} {self.integrity}"


class BenchReport(_Model):
    """The report of a run of ``weightlane bench``."""

    machine: Machine
    setup: Setup
    limits: Limits
    blocking: Blocking
    rows: list[Row]
    unavailable: dict[str, str] = Field(default_factory=dict)
    """Requested engines that cannot run here, with the reason."""
    notes: list[str] = Field(default_factory=list)
    """Warnings about the figures."""

    @property
    def verified(self) -> bool:
        """Whether every row is verified."""
        return all(row.verified for row in self.rows)

    def limit_s(self, row: Row) -> float:
        """Return the lower bound (median) of the latency of `row`: its bare transport, and one more copy where it needs one.

        Shared memory and files in the page cache are copied directly into the parameters. Buckets from gloo need one more
        copy. The bound for an engine without a bare transport is a copy in and a copy out.
        """
        if row.raw_transport_s is None:
            return self.limits.copy_in_then_out_s.median
        extra = self.limits.memcpy_all_receivers_s.median if row.engine == "gloo" else 0.0
        return row.raw_transport_s.median + extra
