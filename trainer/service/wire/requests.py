"""Requests of the Tinker API in JSON: their fields and the values that these may have.

Names are those of the public SDK ``tinker`` 0.38.0. Types are strict. Unknown fields are ignored, so a newer client works. A
known field that is not offered is an error, unless it has its neutral value.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from weightlane.ckpt_engines import ProtocolError

from ...engines.optimizers.settings import AdamParams as AdamStep
from .bodies import PART
from .names import IDENTIFIER, NAME, CheckpointPath

_METADATA_BYTES = 16384
"""Most bytes of a client's remarks about a session, a model or a checkpoint, as JSON, which are stored with it."""
_SHOWN = 3
"""Most faults of a request that its error names."""


def _small(value: Any) -> Any:
    if len(json.dumps(value)) > _METADATA_BYTES:
        raise ValueError(f"more than {_METADATA_BYTES} bytes of JSON")
    return value


def _path(value: str) -> str:
    try:
        CheckpointPath.parse(value)
    except ProtocolError as error:
        raise ValueError(f"{error.message} {error.hint}") from None
    return value


Identifier = Annotated[str, StringConstraints(pattern=IDENTIFIER)]
"""An identifier that the service, or the SDK, made of letters, digits and ``._:-``."""
Name = Annotated[str, StringConstraints(pattern=NAME)]
"""A name that a client chose; it becomes part of a file's name."""
Path = Annotated[str, AfterValidator(_path)]
"""The address of a checkpoint; see `CheckpointPath`."""
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=500)]
Text = Annotated[str, StringConstraints(max_length=500)]
SeqId = Annotated[int, Field(ge=1, lt=2**31)]
"""Number of a model's request, from 1. Requests are carried out in this order, whatever the order of their arrival."""
Number = Annotated[int, Field(ge=0, lt=2**63)]
Ttl = Annotated[int, Field(ge=3600, le=315_360_000)]
"""Seconds: from an hour to ten years."""
Metadata = Annotated[dict[str, Any], AfterValidator(_small)]
Labels = Annotated[dict[str, str], AfterValidator(_small)]


class Request(BaseModel):
    """A body of JSON."""

    model_config = ConfigDict(
        extra="ignore",
        strict=True,
        frozen=True,
        protected_namespaces=(),
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )


AnyRequest = TypeVar("AnyRequest", bound=Request)


def request(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """The request of `kind` in `body`, JSON in UTF-8. Raises `ProtocolError`, which names wrong fields and repeats no value."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        said = [f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}"[:300] for fault in faults[:_SHOWN]]
        more = f" (and {len(faults) - _SHOWN} more)" if len(faults) > _SHOWN else ""
        raise ProtocolError(f"{'; '.join(said)}{more}.", part=f"{PART}, {kind.__name__}") from None


def refuse(asked: bool, what: str) -> None:
    """Raise ValueError if `what`, which is not offered, was asked for."""
    if asked:
        raise ValueError(f"{what} is not offered")


class AddressedRequest(Request):
    """The fields of any request of a model that give its turn, whatever is wrong with the rest."""

    model_id: Identifier
    seq_id: SeqId


class CreateSessionRequest(Request):
    """``create_session``."""

    tags: list[Text] = Field(max_length=64)
    user_metadata: Metadata | None = None
    sdk_version: Text
    project_id: Text | None = None
    display_name: Text | None = None


class SessionHeartbeatRequest(Request):
    """``session_heartbeat``, which clients send every 10 seconds."""

    session_id: Identifier


class LoraConfig(Request):
    """The adapter of a new model."""

    rank: int = Field(ge=1, le=1024)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @model_validator(mode="after")
    def _trains(self) -> Self:
        refuse(not (self.train_unembed or self.train_mlp or self.train_attn), "an adapter that trains no layer")
        return self


class OptimizerConfig(Request):
    """The optimizer of a new model."""

    type: Literal["adamw"] = "adamw"


class CreateModelRequest(Request):
    """``create_model``. Without `lora_config`, all weights are trained."""

    session_id: Identifier
    model_seq_id: Number
    base_model: ModelName
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class GetInfoRequest(Request):
    """``get_info``."""

    model_id: Identifier


class UnloadModelRequest(Request):
    """``unload_model``."""

    model_id: Identifier


class AdamParams(Request):
    """One step of AdamW. The defaults are the SDK's."""

    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = 0.0
    """The largest norm of the gradient; no limit if it is not above 0."""

    def params(self) -> AdamStep:
        """Convert the step to the settings that ranks use."""
        limit = self.grad_clip_norm if self.grad_clip_norm > 0 else math.inf
        return AdamStep(self.learning_rate, (self.beta1, self.beta2), self.eps, self.weight_decay, limit)


class OptimStepRequest(AddressedRequest):
    """``optim_step``."""

    adam_params: AdamParams | None = None
    """AdamW's settings. Clients send those of other optimizers as `optimizer_params`."""
    optimizer_params: Any = None

    @model_validator(mode="after")
    def _adam(self) -> Self:
        refuse(self.optimizer_params is not None, "an optimizer other than adamw")
        if self.adam_params is None:
            raise ValueError("adam_params are missing")
        return self

    def params(self) -> AdamStep:
        """Convert the step to the settings that ranks use."""
        assert self.adam_params is not None
        return self.adam_params.params()


class SaveWeightsRequest(AddressedRequest):
    """``save_weights``: a full training state."""

    path: Name | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Labels | None = None


class SaveWeightsExternalRequest(AddressedRequest):
    """``save_weights_external``: weights without optimizer, for download, as a checkpoint called `path`."""

    path: Name
    ttl_seconds: Ttl | None = None
    user_metadata: Labels | None = None
    age_encryption_recipients: list[Text] | None = None
    """Keys for which files are encrypted; not offered."""

    @model_validator(mode="after")
    def _plain(self) -> Self:
        refuse(bool(self.age_encryption_recipients), "encryption of files by age")
        return self


class LoadWeightsRequest(Request):
    """``load_weights``: into the model `model_id`, or as a new model, number `model_seq_id` of the session `session_id`."""

    model_id: Identifier | None = None
    seq_id: SeqId | None = None
    session_id: Identifier | None = None
    model_seq_id: Number | None = None
    base_model: ModelName | None = None
    user_metadata: Metadata | None = None
    path: Path
    optimizer: bool
    """Whether the optimizer's state is loaded, too."""
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Text | None = None

    @model_validator(mode="after")
    def _one_addressing(self) -> Self:
        into, anew = (self.model_id, self.seq_id), (self.session_id, self.model_seq_id)
        if (None in into) == (None in anew) or any(each is not None for each in (anew if None in anew else into)):
            raise ValueError("it has either model_id and seq_id, or session_id and model_seq_id")
        refuse(self.weights_access_token is not None, "access to checkpoints of other accounts")
        kind = CheckpointPath.parse(self.path).kind
        refuse(kind != "weights", "training from weights that were saved without the optimizer")
        return self


class SaveWeightsForSamplerRequest(AddressedRequest):
    """``save_weights_for_sampler``: as a checkpoint called `path`, or for a new sampling session at once."""

    path: Name | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    """Whether the session keeps this version (snapshot), or moves to newer ones when the model is saved so again (inflight)."""
    ttl_seconds: Ttl | None = None
    user_metadata: Labels | None = None

    @model_validator(mode="after")
    def _one_addressing(self) -> Self:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("it has either path or sampling_session_seq_id")
        moves = self.kind == "inflight"
        refuse(moves and self.path is not None, "an inflight checkpoint with a name")
        refuse(moves and self.ttl_seconds is not None, "a time to live of an inflight checkpoint")
        return self


class CheckpointTtlRequest(Request):
    """The new time to live of an existing checkpoint; None: for ever."""

    ttl_seconds: Ttl | None = None


class WeightsInfoRequest(Request):
    """``weights_info``."""

    tinker_path: Path


class FutureRetrieveRequest(Request):
    """``retrieve_future``."""

    request_id: Identifier
    allow_metadata_only: bool = False
    """Whether the size of a large result may be sent first, so that the client can allocate memory."""


class CancelFutureRequest(Request):
    """``cancel_future``, which clients send for samples that they abandoned."""

    request_id: Identifier
