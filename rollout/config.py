"""What a user may set about rollout replicas."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

START_TIMEOUT_S = 300.0
"""How long a replica of a model that takes no time to load may need."""
GPU_SHARE = 0.9
"""Share of a device's memory that vLLM gets where nobody else needs any."""


class RolloutConfig(BaseModel):
    """Options of every rollout replica of a run; each replica is one vLLM engine in one Ray actor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int = Field(1, ge=1, description="Number of rollout replicas, each a whole copy of the model.")
    tensor_parallel: int = Field(1, ge=1, description="Rollout ranks (worker processes) that share one replica.")
    expert_parallel: bool = Field(
        False,
        description=(
            "Divide the experts of a mixture of experts between the tensor_parallel ranks by number, each whole on one rank,"
            " instead of giving every rank a slice of every expert. The rest of the model is divided as ever."
        ),
    )
    dtype: Literal["float32", "bfloat16", "auto"] = Field(
        "auto",
        description="Data type the replica computes in; auto leaves it to vLLM, which takes the checkpoint's, but bfloat16 (or"
        " float16, where a device has no other) for one in float32.",
    )
    max_model_len: int = Field(1024, ge=2, description="Longest prompt plus completion, in tokens.")
    max_num_seqs: int = Field(64, ge=1, description="Most requests decoded in one step.")
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Share of a device's memory vLLM may use, staging excluded; none: what staging leaves, at most 0.9.",
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1 << 20,
        description="Size of the KV cache per rank in bytes; none lets vLLM profile the device (needed on CPU: 256 MiB there).",
    )
    enforce_eager: bool | None = Field(
        None, description="Run without graph capture and compilation; none means yes on CPU and no elsewhere."
    )
    kv_on_commit: Literal["recompute", "keep"] = Field(
        "recompute",
        description=(
            "What a commit does to key/value caches. recompute: all are dropped and requests in flight prefill their prompt"
            " and the tokens they have again under the new weights, so that later tokens are exactly the new model's. keep:"
            " requests in flight go on with the caches of the old weights (cheaper, later tokens follow a mixture), while"
            " requests begun after the commit never see them."
        ),
    )
    threads_per_rank: int = Field(1, ge=1, description="CPU threads each rollout rank computes with.")
    cpus_per_rank: float = Field(1.0, ge=0.0, description="CPUs Ray reserves for each rollout rank.")
    gpus_per_rank: float | None = Field(
        None,
        ge=0.0,
        description="GPUs Ray reserves for each rollout rank; none: 1 where there are any and vLLM uses them.",
    )
    commit: Literal["staged", "in_place"] = Field(
        "staged",
        description=(
            "How a version in full gets into the weights. staged: it is received beside them while requests are served, and"
            " copied in one go, which can be undone. in_place: for tight memory; requests wait while bucket after bucket is"
            " received and written straight into the weights, which needs memory for one bucket and cannot be undone: a"
            " replica that fails half-way is out of service until the next version. rollout.commit_timeout_s must then allow"
            " for the transfer."
        ),
    )
    staging_limit_bytes: int | None = Field(
        None,
        ge=1,
        description=(
            "Most memory a rollout rank may use to stage versions, in bytes; with commit = in_place it must hold one bucket. Room"
            " for two versions lets it keep the one that serves, so that a commit that fails half-way is undone. none: room"
            " for two of the rank's share of the model, or for one where a device has no more."
        ),
    )
    replace_dead: bool = Field(
        True,
        description=(
            "Start a new replica in the place of one that died, while enough others are left (sync.quorum) for the run to go"
            " on. The only replica of a run is not replaced: its death ends the run."
        ),
    )
    max_replacements: int = Field(3, ge=0, description="Most replicas that one run replaces.")
    concurrency: int = Field(64, ge=1, description="Requests the loop keeps in flight per replica.")
    start_timeout_s: float | None = Field(
        None,
        gt=0.0,
        description="Most seconds a replica may take to load, to rehearse versions and to start; none: 300, and 30 more for each"
        " GB of a rank's share of the model.",
    )

    connect_timeout_s: float = Field(60.0, gt=0.0, description="Most seconds connecting to the publisher may take.")
    request_timeout_s: float = Field(
        600.0, gt=0.0, description="Most seconds one request may take from first to last token."
    )
    commit_timeout_s: float = Field(
        60.0,
        gt=0.0,
        description="Most seconds a commit may take; a replica that needs longer is quarantined until the next one.",
    )
    extra_engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Further vLLM AsyncEngineArgs by name; they win over what weightlane sets."
    )

    @property
    def start_limit_s(self) -> float:
        """`start_timeout_s`, or what a small model may take where that is not set."""
        return START_TIMEOUT_S if self.start_timeout_s is None else self.start_timeout_s

    @model_validator(mode="after")
    def _experts_have_ranks(self) -> Self:
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError("expert_parallel divides experts between ranks: set tensor_parallel to more than 1")
        return self
