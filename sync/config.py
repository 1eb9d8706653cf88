"""What a user can set about the hop from trainer to rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from weightlane.ckpt_engines import ConfigError

Integrity = Literal["full", "off"]
"""Whether every bucket has a checksum that receivers verify."""


CodecPolicy = Literal["dense", "delta", "auto"]
"""What versions are sent as."""


Quantise = Literal["none", "fp8", "int8"]
"""What linear weights are turned into for the way."""


SILENCE_S = 20.0
"""After so many seconds a host that says nothing any more counts as gone: longer than a network takes to find another way."""
_LEAST_SILENCE_S = 2.0
"""The kernel counts probes in whole seconds."""


Relays = Literal["auto", "never"]
"""Whether rollout ranks hand on what they get."""


BYTES_PER_GBIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Network:
    """What links carry. Network cards are taken to send and receive at full speed at the same time."""

    sender_bytes_per_s: float
    """Of a trainer rank's network card."""
    receiver_bytes_per_s: float
    """Of a rollout rank's."""
    latency_s: float = 0.0
    """From the last byte of a bucket leaving until it is there."""
    bucket_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        if (
            self.sender_bytes_per_s <= 0
            or self.receiver_bytes_per_s <= 0
            or self.latency_s < 0
            or self.bucket_bytes <= 0
        ):
            raise ConfigError(
                "speeds and the bucket must be more than nothing, and the latency at least nothing.",
                part="plan",
                hint="Give bytes per second, seconds and bytes.",
            )

    def fill_s(self, nbytes: int) -> float:
        """What a stream of `nbytes` is later behind a relay than in front of it: one bucket, seconds."""
        slowest = min(self.sender_bytes_per_s, self.receiver_bytes_per_s)
        return min(nbytes, self.bucket_bytes) / slowest + self.latency_s


class CheckpointEngineConfig(BaseModel):
    """Which transport carries the weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str = Field("shm", description="Name of the checkpoint engine; `weightlane engines` lists them.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of that engine, validated by the engine's own config type."
    )


class SyncConfig(BaseModel):
    """How a version travels, whatever the transport."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    bucket_mib: float = Field(
        32.0, gt=0, le=4096, description="Payload of one bucket in MiB; two are in flight per sending trainer rank."
    )
    deadline_s: float = Field(
        60.0, gt=0, description="Seconds after which a sync that is not committed is aborted on every side."
    )
    connect_timeout_s: float = Field(
        120.0, gt=0, description="Seconds all participants have to join and to connect their transports."
    )
    stall_s: float = Field(
        15.0,
        gt=0,
        description="Seconds one bucket may take; a peer that needs longer is given up and the others go on without it.",
    )
    rejoin_s: float = Field(
        5.0, gt=0, description="Seconds a rollout has to answer when connections are made anew after a failure."
    )
    retries: int = Field(
        1, ge=0, le=10, description="How often a version is sent again after a failure that nobody can be blamed for."
    )
    quorum: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the replicas that must take a version for it to count; the others stay behind or out of service.",
    )
    wire_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Dtype in which floating tensors travel; auto is the rollout's dtype."
    )
    quantise: Quantise = Field(
        "none",
        description="fp8: the weights of linear layers travel as e4m3 with a float32 scale for each block of 128 x 128. int8:"
        " as int8 with a scale for each row. Either is lossy: a rollout that computes in another type serves the restored"
        " values, and SyncReport.quantisation has the error; one that was started from such a checkpoint loads them as they are.",
    )
    codec: CodecPolicy = Field(
        "dense",
        description="dense: every version in full. delta: only the elements whose bits changed since the version that the"
        " rollouts have, where that is known and takes less; it needs memory for one more local shard on the trainer."
        " auto: whichever is expected to be there sooner, by what was measured.",
    )
    full_every: int = Field(
        100, ge=1, description="With deltas, at the latest every so many versions one is sent in full."
    )
    integrity: Integrity = Field(
        "full",
        description="full: both sides compute a checksum of every bucket, and a version that differs is not committed."
        " off: the transport's own checks must do.",
    )
    relays: Relays = Field(
        "auto",
        description="auto: where sender_gbps and receiver_gbps say what links carry, and the engine allows it, rollout ranks hand"
        " buckets on to one another wherever that is predicted to be sooner than sending to each. never: every trainer rank sends"
        " to each rollout rank itself.",
    )
    sender_gbps: float = Field(
        0.0, ge=0, description="Gbit/s that the network carries from a trainer rank, for choosing relays; 0: not known."
    )
    receiver_gbps: float = Field(
        0.0,
        ge=0,
        description="Gbit/s that the network carries to a rollout rank, and from it at the same time: its share of what its"
        " host's card, and the memory behind it, can do. 0: not known.",
    )
    latency_us: float = Field(
        20.0, ge=0, description="Microseconds that a bucket is on its way beside that, for choosing relays."
    )
    host: str = Field(
        "127.0.0.1",
        description="Address on which the run's hub for control messages listens, and the store in which process groups meet;"
        " loopback unless the run spans machines.",
    )
    port: int = Field(0, ge=0, le=65535, description="Port of the hub; 0 takes a free one.")

    @field_validator("host")
    @classmethod
    def _one_address(cls, host: str) -> str:
        if host in ("", "0.0.0.0", "::"):  # noqa: S104 - refused here
            raise ValueError(
                "must be one address of this machine that the other participants can reach, not a wildcard"
            )
        return host

    @model_validator(mode="after")
    def _speeds_of_both_sides(self) -> Self:
        if bool(self.sender_gbps) != bool(self.receiver_gbps):
            raise ValueError("sender_gbps and receiver_gbps must be given both, or neither")
        return self

    @property
    def network(self) -> Network | None:
        """What links carry, if it is known and relays are allowed."""
        if self.relays == "never" or not self.sender_gbps:
            return None
        return Network(
            BYTES_PER_GBIT * self.sender_gbps,
            BYTES_PER_GBIT * self.receiver_gbps,
            self.latency_us / 1e6,
            self.bucket_bytes,
        )

    @property
    def silence_s(self) -> float:
        """Seconds after which a host that says nothing any more counts as gone: within a sync, and never hastily."""
        return max(_LEAST_SILENCE_S, min(SILENCE_S, self.deadline_s))

    @property
    def bucket_bytes(self) -> int:
        """`bucket_mib` in bytes, rounded up to the stream's alignment."""
        return -(-int(self.bucket_mib * (1 << 20)) // 64) * 64
