"""`ServiceConfig`: where the service listens, who may use it, and how much it takes; and the `ServedModel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from weightlane.plugins.prometheus import is_loopback

from ..config import Section

TOKEN_ENV = "WEIGHTLANE_SERVICE_TOKEN"  # noqa: S105 - a name, not a token
"""Environment variable with the one token of a service that has no ``service.tokens_file``."""
MAX_LORA_RANK = 512
"""The largest rank for which vLLM has slots."""


class ServiceConfig(Section):
    """The HTTP service of ``weightlane tinker``."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 chooses a free one, which is printed.")
    tokens_file: Path | None = Field(
        None,
        description="File with one client a line: a name, a blank, and the token that it sends. Clients of different names don't"
        f" see each other's sessions, models and checkpoints. none: the environment variable {TOKEN_ENV} has the only token.",
    )
    allow_anonymous: bool = Field(
        False, description="Serve every client without a token; only on a loopback address. For trying things out."
    )
    base_model: str = Field(
        "", description="Name by which clients ask for the model; empty: model.path as it is written."
    )
    trains: Literal["adapters", "all_weights"] = Field(
        "adapters",
        description="What models are: low-rank adapters of the base model, many at once, or all its weights, of which trainer"
        " ranks and replicas have one set at a time. With all_weights, a client's lora_config has no effect.",
    )
    max_lora_rank: int = Field(
        64, ge=1, le=MAX_LORA_RANK, description="Largest rank of an adapter; each published version has this many rows."
    )
    lora_alpha: float = Field(32.0, gt=0, description="alpha of every adapter: B (A x) is scaled by alpha / rank.")
    join_clients: bool = Field(
        True,
        description="Compute requests of several models together where they wait at once. Sums are then rounded in another"
        " order, so that a model's weights may differ by rounding from those that it would get alone.",
    )
    join_wait_s: float = Field(
        0.02,
        ge=0,
        description="Seconds that a forward and backward pass waits for one of a model that was answered just now, to join it.",
    )
    max_loaded: int = Field(
        16,
        ge=1,
        description="Most adapters on the trainer ranks; others wait in files until their next request. Adapters amid a"
        " mini-batch stay, also if they are more.",
    )
    max_models: int = Field(1024, ge=1, description="Most models that are not unloaded, over all clients.")
    max_body_bytes: int = Field(64 << 20, ge=1 << 10, description="Largest request body, decompressed, in bytes.")
    max_queued: int = Field(
        256, ge=1, description="Most training requests of one model that wait; further ones are told to try again."
    )
    max_sampling: int = Field(
        4096, ge=1, description="Most sampling requests that wait or run; further ones are told to try again."
    )
    save_every: int = Field(
        16,
        ge=1,
        description="Optimizer steps of a model between two automatic saves, or 64 times as many requests; after a crash,"
        " requests since then run again.",
    )
    gap_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Seconds that requests of a model wait for an earlier one that has not arrived; then they fail.",
    )
    session_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Seconds without a heartbeat after which a session ends: its samplers are closed and its models unloaded.",
    )
    max_versions: int = Field(
        64,
        ge=2,
        description="Most versions that replicas keep loaded; one that was used longest ago comes back when it is sampled from.",
    )
    snapshot_kept_s: float = Field(
        21600.0,
        gt=0,
        description="Seconds since its last use after which a snapshot that was saved without a name is deleted.",
    )
    answer_kept_s: float = Field(
        3600.0, gt=0, description="Seconds that an answer is kept for its client to fetch, or fetch again."
    )
    restarts: int = Field(
        3,
        ge=0,
        description="Most times in an hour that trainer ranks and replicas are started again after one has died; then the"
        " service ends. It goes on by itself while other replicas are left.",
    )
    shutdown_s: float = Field(
        60.0,
        gt=0,
        description="Seconds that running requests have to finish at shutdown; the rest run after the next start.",
    )

    @property
    def trains_weights(self) -> bool:
        """Whether models are all weights; otherwise they are adapters."""
        return self.trains == "all_weights"

    @model_validator(mode="after")
    def _open_only_here(self) -> Self:
        if self.allow_anonymous and not is_loopback(self.host):
            raise ValueError(f"allow_anonymous is true, and host {self.host} can be reached from other machines")
        return self


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that clients train, or train adapters of."""

    name: str
    """The name that clients ask for."""
    architecture: str
    directory: Path
    """Hugging Face directory, readable on every trainer rank. Clients get it as the tokenizer's name."""
    vocabulary: int
    max_length: int
    """Most tokens of one sequence."""
    eos_ids: Sequence[int]
    layers: Mapping[str, str]
    """``attention`` or ``mlp`` for each linear layer in decoder layers, by the last part of its name."""
