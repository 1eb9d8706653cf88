"""The arguments of vLLM's weight-transfer calls: plain fields, validated by the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weightlane.ckpt_engines import ConfigError
from weightlane.sync import CommitMode

from ..config import AdapterConfig

_Request = TypeVar("_Request", bound=BaseModel)
ENGINE_SHARE = 0.9
"""Share of a commit's time after which the engine gives up: before its client does, so that it never resumes unnoticed."""
RANKS = "ranks"
"""Key in the mailbox of `replica_scope` of the number of the replica's ranks."""

DEEP = 2
"""The level of vLLM's sleep that frees the weights without a copy."""
WEIGHTS, CACHES = "weights", "kv_cache"
"""vLLM's names of the parts of its memory that wake one after the other."""
MEMORY_USE = "weightlane_memory_use"
"""The call that returns each rank's `MemoryUse`."""


def replica_scope(replica: str) -> str:
    """The scope of the mailbox in which a connected replica says how many ranks it has. vLLM's calls return nothing."""
    return f"replica/{replica}"


class ConnectRequest(BaseModel):
    """The argument of ``init_weight_transfer_engine``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rendezvous: dict[str, Any] = Field(description="Host and port of the publisher's control store.")
    replica: str = Field(min_length=1, description="Name of this replica; ranks are called <replica>/<rank>.")
    backend: str = Field(min_length=1, description="Name of the checkpoint engine.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the checkpoint engine.")
    commit: CommitMode = Field(
        "staged", description="staged, or in_place: full versions are written into the weights as they are received."
    )
    adapter: AdapterConfig | None = Field(
        None, description="The adapter that versions are; none: versions are weights."
    )
    staging_limit_bytes: int = Field(
        0, ge=0, description="Most memory a rank may use for staging, in bytes; 0: as much as versions need."
    )
    take_over: bool = Field(False, description="Whether to leave a publisher that lives for this one.")


class UpdateRequest(BaseModel):
    """The argument of ``update_weights``: a version to commit, or one to roll back."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int | None = Field(None, ge=0, description="The staged version to put into service.")
    rollback_of: int | None = Field(
        None, ge=0, description="The version to roll back: the version before it serves again."
    )

    adapter: int | None = Field(
        None,
        ge=0,
        description="vLLM's id of the adapter that serves afterwards, where versions are adapters; 0 in the rollback of a first"
        " one.",
    )
    announced: AdapterConfig | None = Field(
        None,
        description="The adapter that the version is; none: the adapter of the connection, with its rank, alpha and targets.",
    )
    in_use: frozenset[int] = Field(
        frozenset(), description="Ids of other adapters that stay loaded; all others are dropped."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.version is None) == (self.rollback_of is None):
            raise ValueError("give either version or rollback_of")
        return self


class EngineCommit(BaseModel):
    """The field ``engine_commit`` of an update: the engine core then makes the complete commit in one call.

    vLLM's engine core reads it and does not pass it to the ranks: see `weightlane.rollout.vllm.commit_in_core`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight_version: str = Field(min_length=1, description="The version that later tokens carry.")
    caches: Literal["recompute", "keep"] = Field(
        "recompute", description="Whether key/value caches are recomputed or retained: see RolloutConfig.kv_on_commit."
    )
    within_s: float = Field(
        60.0, gt=0.0, description="Seconds after which the client has given up, so that the engine must not resume."
    )
    trusted: bool = Field(
        True,
        description="Whether the current weights may serve on if they are still in place after a failure.",
    )


def validated(
    model: type[_Request], fields: Mapping[str, Any], *, part: str = "weight-transfer call", hint: str = ""
) -> _Request:
    """`fields` as a `model`; raises a `ConfigError` that names the wrong fields, by default with all that there are."""
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc'])) or 'value'}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"{problems}.", part=part, hint=hint or f"Fields: {', '.join(model.model_fields)}.") from None
