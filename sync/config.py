"""Settings of the sync from trainer to rollout: `CheckpointEngineConfig` and `SyncConfig`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from weightlane.ckpt_engines.toolkit import one_address

Integrity = Literal["full", "off"]
"""Whether every bucket has a checksum that receivers verify."""

CodecPolicy = Literal["dense", "delta", "auto"]
"""The codec with which versions are sent."""

Quantise = Literal["none", "fp8"]
"""The type in which the weights of linear layers are sent."""

Relay = Literal["off", "chain", "tree"]
"""How rollout ranks relay buckets to one another."""

DEFAULT_BUCKET_MIB = 32.0
"""Payload of a bucket in MiB: so large that the control messages about buckets take a negligible share of a version's time."""
MIB = 1 << 20

SILENCE_S = 20.0
"""Seconds of silence after which a host counts as gone; longer than a network takes to find another route."""
_LEAST_SILENCE_S = 2.0
"""Lower limit for `SyncConfig.silence_s`, because the kernel counts keep-alive probes in whole seconds."""


class CheckpointEngineConfig(BaseModel):
    """The checkpoint engine, which sends the weights, and its options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str = Field("shm", description="Name of the checkpoint engine; `weightlane engines` lists them.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of that engine, validated by the engine's own config type."
    )


class SyncConfig(BaseModel):
    """Settings of the sync that hold for any checkpoint engine."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    bucket_mib: float = Field(
        DEFAULT_BUCKET_MIB,
        gt=0,
        le=4096,
        description="Payload of one bucket in MiB; a sending trainer rank has up to eight in flight, two if they must be packed.",
    )
    deadline_s: float = Field(
        60.0, gt=0, description="Seconds after which a sync that is not committed is aborted on every side."
    )
    connect_timeout_s: float = Field(
        120.0, gt=0, description="Seconds within which all participants must join and connect their transports."
    )
    stall_s: float = Field(
        15.0,
        gt=0,
        description="Seconds one bucket may take; a peer that needs longer is excluded, and the others go on without it.",
    )
    rejoin_s: float = Field(
        5.0, gt=0, description="Seconds within which a rollout must answer when a new session starts after a failure."
    )
    retries: int = Field(
        1,
        ge=0,
        le=10,
        description="How often a version is sent again after a failure for which no replica can be blamed.",
    )
    quorum: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the replicas that must commit a version for it to count; the others stay behind or out of service.",
    )
    wire_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Dtype in which floating-point tensors are sent; auto is the rollout's dtype."
    )
    quantise: Quantise = Field(
        "none",
        description="fp8: the weights of linear layers are sent as e4m3 with a float32 scale for each block of 128 x 128."
        " That is lossy: a rollout that computes in another type serves the restored values, and SyncReport.quantisation has the"
        " error; one that was started from such a checkpoint loads them unchanged.",
    )
    codec: CodecPolicy = Field(
        "dense",
        description="dense: every version in full. delta: only the elements whose bits changed since the version that the"
        " rollouts have, where that is known and smaller; it needs memory for one more local shard on the trainer."
        " auto: delta while the version before changed less than 3 % of all elements, dense from 4 % on.",
    )
    full_every: int = Field(100, ge=1, description="With deltas, at least one version in so many is sent in full.")
    integrity: Integrity = Field(
        "full",
        description="full: both sides compute a checksum of every bucket, and a version that differs is not committed."
        " off: the transport's own checks must suffice.",
    )
    relay: Relay = Field(
        "off",
        description="off: every trainer rank sends to each rollout rank itself. chain: it sends to one of the ranks that need the"
        " same slices, which relays every bucket to the next one. tree: every rank sends to two others. Relays are for trainer"
        " ranks whose network cards are the bottleneck, and for engines that send between hosts.",
    )
    host: Annotated[str, AfterValidator(one_address)] = Field(
        "127.0.0.1",
        description="Address on which the run's hub for control messages listens; loopback unless the run spans machines.",
    )
    port: int = Field(0, ge=0, le=65535, description="Port of the hub; 0 takes a free one.")

    @property
    def silence_s(self) -> float:
        """Seconds of silence after which a host counts as gone: within the deadline of a sync if possible."""
        return max(_LEAST_SILENCE_S, min(SILENCE_S, self.deadline_s))

    @property
    def quantised(self) -> str:
        """The format of linear weights, as in a manifest: `quantise`, or empty for ``"none"``."""
        return "" if self.quantise == "none" else self.quantise

    @property
    def bucket_bytes(self) -> int:
        """`bucket_mib` in bytes, rounded up to the stream's alignment."""
        return 64 * math.ceil(self.bucket_mib * MIB / 64)
