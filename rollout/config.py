"""`RolloutConfig`: the options of rollout replicas."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

START_TIMEOUT_S = 300.0
"""Default seconds that a replica of a small model may take to start; `RolloutConfig.start_timeout_s` adds the time to load."""
GPU_SHARE = 0.9
"""Share of a device's memory that vLLM gets if nothing else uses the device."""


class AdapterConfig(BaseModel):
    """A low-rank adapter that is sent as a version instead of weights; a run takes it from trainer.lora."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(ge=1, description="Rows of A and columns of B.")
    alpha: float = Field(gt=0, description="B (A x) is scaled by alpha / rank.")
    targets: tuple[str, ...] = Field(
        (),
        description="Linear layers by the last part of their Hugging Face names; none given: all those inside decoder layers.",
    )


class RolloutConfig(BaseModel):
    """Options of every rollout replica of a run; each replica is one engine in one Ray actor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str = Field(
        "vllm", description="Name of the rollout engine; `weightlane engines` lists the installed ones."
    )
    replicas: int = Field(1, ge=1, description="Number of rollout replicas, each a complete copy of the model.")
    tensor_parallel: int = Field(1, ge=1, description="Rollout ranks (worker processes) that share one replica.")
    sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="Rollout ranks of each replica that a run begins with, if they differ, such as [2, 1, 1]; replicas is then"
        " their number. tensor_parallel is the size of replicas that are added later.",
    )
    expert_parallel: bool = Field(
        False,
        description=(
            "Divide the experts of a mixture of experts between the tensor_parallel ranks by number, each completely on one rank,"
            " instead of giving every rank a slice of every expert. The rest of the model is divided as without this option."
        ),
    )
    dtype: Literal["float32", "bfloat16", "auto"] = Field(
        "auto",
        description="Data type the replica computes in; auto leaves it to vLLM, which takes the checkpoint's, but bfloat16 (or"
        " float16, on a device without bfloat16) for a checkpoint in float32.",
    )
    max_model_len: int = Field(1024, ge=2, description="Longest prompt plus completion, in tokens.")
    max_num_seqs: int = Field(64, ge=1, description="Most requests decoded in one step.")
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Share of a device's memory vLLM may use, without staging; none: what staging leaves, at most 0.9.",
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1 << 20,
        description="Size of the KV cache per rank in bytes; none lets vLLM profile the device, and means 256 MiB on CPU.",
    )
    enforce_eager: bool | None = Field(
        None, description="Run without graph capture and compilation; none means yes on CPU and no elsewhere."
    )
    kv_on_commit: Literal["recompute", "keep"] = Field(
        "recompute",
        description=(
            "Whether a commit keeps key/value caches. recompute: all caches are dropped, and requests in flight prefill their"
            " prompt and tokens again under the new weights, so that later tokens are exactly the new model's. keep: requests"
            " in flight continue with the caches of the old weights (cheaper, but later tokens follow a mixture), while"
            " requests begun after the commit never see these caches."
        ),
    )
    threads_per_rank: int = Field(1, ge=1, description="CPU threads each rollout rank computes with.")
    cpus_per_rank: float = Field(1.0, ge=0.0, description="CPUs Ray reserves for each rollout rank.")
    gpus_per_rank: float | None = Field(
        None,
        ge=0.0,
        description="GPUs Ray reserves for each rollout rank; none: 1 if there are GPUs and vLLM uses them.",
    )
    commit: Literal["staged", "in_place"] = Field(
        "staged",
        description=(
            "How a full version is written into the weights. staged: it is received into separate memory while requests are"
            " served, then copied between two decode steps, and can be rolled back. in_place: for tight memory; requests wait"
            " while each bucket is received and written straight into the weights. This needs memory for one bucket of each"
            " trainer rank that sends to it, and cannot be rolled back: a replica that fails half-way is out of service until"
            " the next version."
            " rollout.commit_timeout_s must then allow for the transfer."
        ),
    )
    staging_limit_bytes: int | None = Field(
        None,
        ge=1,
        description=(
            "Most memory a rollout rank may use to stage versions, in bytes; with commit = in_place at least one bucket of each"
            " trainer rank that sends to it. Memory for two versions lets the rank keep the serving one, so that a commit that"
            " fails half-way is rolled back. none: twice the rank's share of the model, or once if a device has no more."
        ),
    )
    adapter: AdapterConfig | None = Field(
        None,
        description="Versions are a low-rank adapter for the weights of model.path, instead of weights. A run fills it in from"
        " trainer.lora where trainer.lora.publish is adapter.",
    )
    adapter_slots: int = Field(
        2,
        ge=1,
        description="Adapter versions that one step can compute with. With trainer.lora.publish = adapter, requests of a further"
        " version wait until those of another have ended.",
    )
    sleeps: bool = Field(
        False,
        description="Whether replicas free weights and caches while the trainer uses their devices. A run fills it in from"
        " trainer.colocate.",
    )
    routed_experts: bool = Field(
        False,
        description="Whether completions have the experts of each token. A run fills it in from algorithm.router_replay.",
    )
    replace_dead: bool = Field(
        True,
        description=(
            "Replace a replica that died by a new one, while enough others are left (sync.quorum) for the run to continue. The"
            " only replica of a run is not replaced: its death ends the run."
        ),
    )
    max_replacements: int = Field(3, ge=0, description="Most replicas that one run replaces.")
    autoscale: bool = Field(
        False,
        description="The number of replicas follows the room for them in the Ray cluster, as its machines come and go, from"
        " min_replicas to max_replicas. A dead replica has no successor of its own; another one starts where there is room.",
    )
    min_replicas: int = Field(
        1, ge=1, description="Fewest replicas that weightlane scale may ask for; with autoscale, fewer end the run."
    )
    max_replicas: int | None = Field(
        None, ge=1, description="Most replicas of a run that is scaled; none: as many as the machines have room for."
    )
    drain_timeout_s: float = Field(
        60.0,
        ge=0.0,
        description="Seconds in which a replica that is to leave may finish what it generates. Others then begin again with"
        " the rest, which is mostly long.",
    )
    concurrency: int = Field(64, ge=1, description="Requests the loop keeps in flight per replica.")
    start_timeout_s: float | None = Field(
        None,
        gt=0.0,
        description="Most seconds a replica may take to load, to rehearse versions and to start; none: 300, and 30 more for each"
        " GB of a rank's share of the model.",
    )

    connect_timeout_s: float = Field(60.0, gt=0.0, description="Most seconds connecting to the publisher may take.")
    request_timeout_s: float = Field(
        600.0,
        gt=0.0,
        description="Most seconds one request may take from first to last token. A completion that takes longer is left out of"
        " training, which trains brevity; the bias that is printed at the end counts it with algorithm.max_new_tokens.",
    )
    commit_timeout_s: float = Field(
        60.0,
        gt=0.0,
        description="Most seconds a commit may take, or falling asleep, or waking; a replica that needs longer is quarantined"
        " until the next commit.",
    )
    extra_engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of the engine by name. vllm: fields of its AsyncEngineArgs, which override those that"
        " weightlane sets; some that it relies on are refused, such as tensor_parallel_size. sglang: options of its"
        " launch_server, with underscores, and python, the interpreter of its environment; or server, the address of one that"
        " runs already on this machine, and its api_key.",
    )

    @property
    def each(self) -> list[Self]:
        """The options of each replica that a run begins with, in order: only `tensor_parallel` differs."""
        sizes = self.sizes or (self.tensor_parallel,) * self.replicas
        return [self.model_copy(update={"tensor_parallel": size, "sizes": ()}) for size in sizes]

    @property
    def by_size(self) -> dict[int, Self]:
        """The options of a replica by its number of ranks, for each number that a run begins with."""
        return {one.tensor_parallel: one for one in self.each}

    @property
    def ranks(self) -> int:
        """The number of rollout ranks that a run begins with."""
        return sum(self.sizes) or self.replicas * self.tensor_parallel

    def of_replica(self, name: str) -> Self:
        """Return the options of the replica ``rollout-<number>``, or ``rollout-<number>.<successor>``."""
        each, number = self.each, int(name.partition("-")[2].partition(".")[0])
        return each[number] if number < len(each) else self.model_copy(update={"sizes": ()})

    @property
    def start_limit_s(self) -> float:
        """`start_timeout_s`, or the default for a small model."""
        return START_TIMEOUT_S if self.start_timeout_s is None else self.start_timeout_s

    @model_validator(mode="after")
    def _adapters_are_staged(self) -> Self:
        if self.adapter is not None and self.commit == "in_place":
            raise ValueError("commit is in_place, and versions of an adapter are staged: set commit to staged")
        return self

    @model_validator(mode="after")
    def _replicas_within_limits(self) -> Self:
        most = math.inf if self.max_replicas is None else self.max_replicas
        if self.min_replicas > most:
            raise ValueError(f"min_replicas is {self.min_replicas}, and max_replicas is {most}")
        # Without autoscale, they only limit what weightlane scale may ask for.
        if self.autoscale and not self.min_replicas <= self.replicas <= most:
            raise ValueError(f"replicas is {self.replicas}, and with autoscale from min_replicas to max_replicas")
        return self

    @model_validator(mode="before")
    @classmethod
    def _as_many_as_have_sizes(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and isinstance(sizes := keys.get("sizes"), list | tuple) and sizes:
            if keys.get("replicas", len(sizes)) != len(sizes):
                raise ValueError(f"replicas is {keys['replicas']}, and sizes has {len(sizes)}: leave replicas out")
            return {**keys, "replicas": len(sizes)}
        return keys

    @model_validator(mode="after")
    def _experts_have_ranks(self) -> Self:
        if self.expert_parallel and 1 in (self.tensor_parallel, *self.sizes):
            raise ValueError("expert_parallel divides experts between ranks: set tensor_parallel to more than 1")
        return self
