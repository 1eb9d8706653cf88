"""What vLLM's weight-transfer calls are made with: plain fields, checked by the ranks themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weightlane.ckpt_engines import ConfigError
from weightlane.sync import CommitMode

_Request = TypeVar("_Request", bound=BaseModel)


class ConnectRequest(BaseModel):
    """What ``init_weight_transfer_engine`` is called with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rendezvous: dict[str, Any] = Field(description="Where the publisher's control store listens: host and port.")
    replica: str = Field(min_length=1, description="Name of this replica; ranks are called <replica>/<rank>.")
    backend: str = Field(min_length=1, description="Name of the checkpoint engine.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the checkpoint engine.")
    commit: CommitMode = Field(
        "staged", description="staged, or in_place: full versions are written into the weights as they come."
    )
    staging_limit_bytes: int = Field(
        0, ge=0, description="Most memory a rank may use for staging, in bytes; 0: what versions need."
    )


class UpdateRequest(BaseModel):
    """What ``update_weights`` is called with: one of the two."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int | None = Field(None, ge=0, description="The staged version to put into service.")
    rollback_of: int | None = Field(
        None, ge=0, description="The version to take back: what served before it serves again."
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.version is None) == (self.rollback_of is None):
            raise ValueError("give either version or rollback_of")
        return self


class WholeCommit(BaseModel):
    """What `UpdateRequest` comes with under the name ``whole``, where one call is to do all of a commit.

    It is for vLLM's engine core, which does not pass it on to the ranks: see `weightlane.rollout.vllm.engine_core`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight_version: str = Field(min_length=1, description="What tokens are stamped with from then on.")
    caches: Literal["recompute", "keep"] = Field(
        "recompute", description="What becomes of key/value caches: see RolloutConfig.kv_on_commit."
    )
    within_s: float = Field(
        60.0, gt=0.0, description="After so many seconds the client has given up, and the engine must not resume."
    )
    sound: bool = Field(
        True,
        description="Whether the weights that serve now may go on serving if they are still in place after a failure.",
    )


def validated(model: type[_Request], fields: Mapping[str, Any]) -> _Request:
    """`fields` as a request; `ConfigError` naming what is wrong with them."""
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc'])) or 'value'}: {item['msg']}" for item in error.errors())
        raise ConfigError(
            f"{problems}.", part="weight-transfer call", hint=f"Fields: {', '.join(model.model_fields)}."
        ) from None
