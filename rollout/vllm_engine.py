"""The weight-transfer engine ``weightlane``: how a version reaches the model inside a vLLM worker process.

Versions are staged by a `weightlane.sync.Subscriber` on its own thread while the worker generates. What goes through vLLM's
weight-transfer calls is therefore only the control, and the whole commit happens inside one of them::

    init_weight_transfer_engine({"rendezvous": {...}, "replica": "rollout-0", "backend": "shm", "options": {}, ...})
    pause_generation(mode="keep", clear_cache=True)
    start_weight_update(); update_weights({"version": 7}); finish_weight_update(weight_version="7")
    resume_generation()

Any client can drive that, an HTTP client of a stock server included. A failed ``update_weights`` raises; its text says whether
the old weights are intact. After a failure the client calls ``finish_weight_update`` once and ignores its result: vLLM keeps
the session open in the ranks that did not raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from weightlane.ckpt_engines import CommitError, ConfigError, ProtocolError, WeightlaneError, as_weightlane_error
from weightlane.sync import Expectation, Subscriber

from .agreement import RankGroup
from .expectation import expectation_of
from .weight_loading import load_version, refuse_unsupported
from .wire import RemoteFailure, RemoteFailureError

logger = init_logger("vllm.weightlane")

_Request = TypeVar("_Request", bound=BaseModel)


class ConnectRequest(BaseModel):
    """What ``init_weight_transfer_engine`` is called with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rendezvous: dict[str, Any] = Field(description="Where the publisher's control store listens: host and port.")
    replica: str = Field(min_length=1, description="Name of this replica; ranks are called <replica>/<rank>.")
    backend: str = Field(min_length=1, description="Name of the checkpoint engine.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the checkpoint engine.")
    staging_limit_bytes: int = Field(8 << 30, ge=1, description="Most memory a rank may use for staging, in bytes.")


class CommitRequest(BaseModel):
    """What ``update_weights`` is called with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = Field(ge=0, description="The staged version to put into service.")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped to us
    """The fields as they came; validated where all ranks can agree on the outcome."""

    fields: Mapping[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is untyped to us
    """As `InitInfo`."""

    fields: Mapping[str, Any]


class WeightlaneTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]  # vLLM is untyped to us
    """One rollout rank's end of a weight sync. Created by vLLM after the model is loaded; called between steps."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    subscriber_type: ClassVar[Callable[..., Subscriber]] = Subscriber
    """What stages versions; a host that has its own way of staging may set another."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._subscriber: Subscriber | None = None
        self._expectation: Expectation | None = None
        self._intact = True

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """Accept any fields: vLLM calls this outside the point where ranks agree, so it must not raise."""
        return InitInfo(init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        """As `parse_init_info`."""
        return UpdateInfo(update_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Leave the publisher this rank was connected to, if any, and subscribe to the one named.

        Raises:
            RemoteFailureError: With `ConfigError` or what the subscriber raised; no rank stays subscribed.
        """
        self.shutdown()
        group = self._group()
        if error := group.first_error(self._caught(lambda: self._subscribe(init_info.fields))):
            self.shutdown()
            self._report(group, error)

    def start_weight_update(self) -> None:
        """Nothing to prepare: see the module's docstring."""

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Put the version ``update_info["version"]`` into service.

        Raises:
            RemoteFailureError: With the first rank's typed error and whether the old weights are intact.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """As `update_weights`. No rank begins to load before every rank has the complete version."""
        group = self._group()
        staged: dict[str, torch.Tensor] = {}
        request = CommitRequest(version=0)

        def take() -> None:
            nonlocal request
            request = _validated(CommitRequest, update_info.fields)
            staged.update(self._take(request.version))

        if error := group.first_error(self._caught(take)):
            self._report(group, error)
            return
        began = time.perf_counter()
        self._intact = False
        error = group.first_error(self._caught(lambda: self._load(staged)))
        staged.clear()
        if trouble := self._caught(lambda: self._release(request.version)):
            # Staging that cannot be reused fails the next sync, with its own error; this version is in place.
            logger.warning("weightlane: staging of version %d could not be released: %s", request.version, trouble)
        if error:
            self._report(group, error)
            return
        self._intact = True
        logger.debug("weightlane: version %d loaded in %.4f s", request.version, time.perf_counter() - began)

    def shutdown(self) -> None:
        """Leave the publisher. The model keeps the weights it has; idempotent."""
        subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None:
            subscriber.close()

    def _group(self) -> RankGroup:
        tensor_parallel = self.parallel_config.tensor_parallel_size > 1
        return RankGroup(get_tp_group().cpu_group if tensor_parallel else None)

    def _subscribe(self, fields: Mapping[str, Any]) -> None:
        request = _validated(ConnectRequest, fields)
        refuse_unsupported(self.model, self.vllm_config, self.device)
        model_config = self.vllm_config.model_config
        self._expectation = expectation_of(
            model_config.model,
            dtype=model_config.dtype,
            tied_embeddings=bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False)),
        )
        self._subscriber = type(self).subscriber_type(
            f"{request.replica}/{self.parallel_config.rank}",
            request.rendezvous,
            request.backend,
            request.options,
            self._expectation,
            staging_limit_bytes=request.staging_limit_bytes,
            device=self.device,
        )

    def _take(self, version: int) -> dict[str, torch.Tensor]:
        if self._subscriber is None or self._expectation is None:
            raise ProtocolError(
                f"version {version} was to be committed before this rank was connected.",
                part=self._part,
                hint="Call init_weight_transfer_engine first.",
            )
        tensors = self._subscriber.take(version)
        absent = self._expectation.tensors.keys() - tensors.keys() - self._expectation.tied.keys()
        if absent:
            raise ProtocolError(f"version {version} lacks {', '.join(sorted(absent)[:3])}.", part=self._part)
        return tensors

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        load_version(self.model, self.model_config, tensors, part=self._part)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # The staging memory is reused as soon as this returns.

    def _release(self, version: int) -> None:
        assert self._subscriber is not None
        self._subscriber.release(version)

    def _caught(self, step: Callable[[], None]) -> WeightlaneError | None:
        """Run this rank's share of a step and return what it raised: ranks must agree before any of them raises."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - any error must reach the agreement, or the other ranks would hang in it
            return as_weightlane_error(error, self._part)
        return None

    def _report(self, group: RankGroup, error: WeightlaneError) -> None:
        if not self._intact and not isinstance(error, CommitError):
            error = CommitError(
                f"an earlier commit failed half-way and this one could not begin: {type(error).__name__}: {error}",
                part=self._part,
                hint="Send a complete version again.",
            )
        if group.raises:
            raise RemoteFailureError(RemoteFailure(error, self._intact))

    @property
    def _part(self) -> str:
        return f"rollout rank {self.parallel_config.rank}"


def _validated(model: type[_Request], fields: Mapping[str, Any]) -> _Request:
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc'])) or 'value'}: {item['msg']}" for item in error.errors())
        raise ConfigError(
            f"{problems}.", part="weight-transfer call", hint=f"Fields: {', '.join(model.model_fields)}."
        ) from None
