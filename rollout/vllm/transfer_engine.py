"""The weight-transfer engine ``weightlane``: how a version reaches the model inside a vLLM worker process.

Versions are staged by a `weightlane.sync.Subscriber` on its own thread while the worker generates. What goes through vLLM's
weight-transfer calls is therefore only the control, and the whole commit is one of them::

    init_weight_transfer_engine({"rendezvous": {...}, "replica": "rollout-0", "backend": "shm", "options": {}, ...})
    update_weights({"version": 7, "whole": {"weight_version": "7"}})

vLLM's engine core reads ``whole`` (see `weightlane.rollout.vllm.engine_core`), pauses, makes the ranks do what this module does
with the rest, and resumes. A client can also do each of these by itself::

    pause_generation(mode="keep", clear_cache=True)
    start_weight_update(); update_weights({"version": 7}); finish_weight_update(weight_version="7")
    resume_generation()

``update_weights({"rollback_of": 7, ...})`` in the same place takes version 7 back; the caller then names the version before it.

With ``"commit": "in_place"`` nothing is staged: ``update_weights`` itself receives the version, bucket after bucket, and writes
each into the parameters. What fails before the first is written leaves the old weights in place, later it leaves a mixture.

Any client can drive that, an HTTP client of a stock server included. A version that cannot be loaded is undone by the same
call, on every rank, where the one before is still kept. A failed ``update_weights`` raises; its text says whether the old
weights are in place, bit for bit, on every rank. After a failure without ``whole`` the client calls ``finish_weight_update``
once, without a version, and ignores its result: vLLM keeps the session open in the ranks that did not raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from weightlane.ckpt_engines import (
    CommitError,
    DeltaBaseError,
    ProtocolError,
    QuarantinedError,
    WeightlaneError,
    as_weightlane_error,
)
from weightlane.sync import Expectation, LiveStream, Subscriber
from weightlane.sync.codecs.quantised.restored import are_restored

from ..commit.rank_agreement import RankGroup
from ..commit.transfer_calls import ConnectRequest, UpdateRequest, validated
from ..commit.wire import RemoteFailure, RemoteFailureError
from ..layout import SourceSpec
from ..layout.loader import VersionLoader
from ..layout.loading.expectation import checkpoint_specs, expectation_of
from ..layout.loading.quantised_models import refuse_in_place
from ..layout.loading.weight_loading import refuse_unsupported
from ..layout.write.live_delta import LiveDelta
from ..vllm_internals.internals import check_internals, get_tp_group, set_current_vllm_config

logger = init_logger("vllm.weightlane")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped to us
    """The fields as they came; validated where all ranks can agree on the outcome."""

    fields: Mapping[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is untyped to us
    """As `InitInfo`."""

    fields: Mapping[str, Any]


@dataclass
class _Change:
    """What one call puts into the model, on this rank."""

    version: int = -1
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Views of staging memory; empty while nothing of it is taken."""
    delta: LiveDelta | None = None
    """What changes places with live elements, instead of `tensors`."""
    stream: LiveStream | None = None
    """What is written as it comes, instead of `tensors`."""
    before: int | None = None
    """The version that serves until then, if it can be gone back to."""
    way: str = ""
    """How it was loaded: see `weightlane.rollout.layout`."""


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
        """Whether the model is one complete version, or the checkpoint."""
        self._held: int | None = None
        """Which version; None while it is the checkpoint's, or not intact."""
        self._before: int | None = None
        """What was held before `_held`; None when that cannot be gone back to."""
        self._undo: LiveDelta | None = None
        """What takes `_held` back, if it came as a delta."""
        self._in_place = False
        self._loader: VersionLoader | None = None
        """What it has learned about the model holds for every publisher."""
        self._refusal = self._learn()
        """Why this model takes no versions, if it does not."""

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
        asked: list[ConnectRequest] = []
        error = group.first_error(self._caught(lambda: asked.append(self._examine(init_info.fields))))
        if error is None:
            error = group.first_error(self._caught(lambda: self._subscribe(asked[0])))
        if error is not None:
            self.shutdown()
            self._raise(group, error)

    def start_weight_update(self) -> None:
        """Nothing to prepare: see the module's docstring."""

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Put the version ``update_info["version"]`` into service, or take ``update_info["rollback_of"]`` back.

        Raises:
            RemoteFailureError: With the first rank's typed error and whether the old weights are in place.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """As `update_weights`. No rank begins to load before every rank has everything it needs."""
        group = self._group()
        change = _Change()
        error = group.first_error(self._caught(lambda: self._prepare(change, update_info.fields)))
        if change.stream is not None:
            error = self._write_arriving(group, change.stream, error)
        elif error is None and change.delta is not None:
            error = self._exchange(group, change)
        elif error is None and change.tensors:
            error = group.first_error(self._caught(lambda: self._known_loader.learn_for(change.tensors, group)))
            if error is None:
                error = self._replace(group, change)
        self._release(change)
        if error is None:
            return
        if not self._intact and not isinstance(error, QuarantinedError):
            error = QuarantinedError(
                f"an earlier commit failed half-way and this one could not begin: {type(error).__name__}: {error}",
                part=self._part,
                hint="Send a complete version again.",
            )
        self._raise(group, error)

    def _write_arriving(
        self, group: RankGroup, stream: LiveStream, error: WeightlaneError | None
    ) -> WeightlaneError | None:
        """Write every bucket of a version into the parameters as it comes, on every rank, unless there was an `error` before."""
        loader, subscriber = self._known_loader, self._subscribed(stream.version)
        if error is None:
            specs = {name: SourceSpec(spec.shape, spec.dtype) for name, spec in stream.specs.items()}
            error = group.first_error(self._caught(lambda: loader.learn(specs, group)))
        if error is not None:
            stream.fail(error)  # whoever receives must not wait for this rank
            subscriber.restored()
            return error
        self._held, self._before, self._undo, self._intact = None, None, None, False
        error = group.first_error(self._caught(lambda: loader.load_pieces(stream.parts())))
        if error is None:
            self._held, self._intact = stream.version, True
            subscriber.prepare_delta = loader.live_delta if loader.takes_deltas else None
            return None
        stream.fail(error)
        return _mixture(error, "It was written in place, nothing is left to go back to.", self._part)

    def _learn(self) -> WeightlaneError | None:
        """Find out how versions like the checkpoint are written, before the model serves; what is against it, if anything is.

        There is room for a second model now, and nobody waits for an answer.
        """
        group = self._group()
        specs: dict[str, SourceSpec] = {}
        with set_current_vllm_config(self.vllm_config):
            error = group.first_error(self._caught(lambda: specs.update(self._look_at_model())))
            if error is None:
                error = group.first_error(self._caught(lambda: self._known_loader.learn(specs, group)))
        return error

    def _look_at_model(self) -> dict[str, SourceSpec]:
        """The tensors of its checkpoint, as they are usually sent."""
        check_internals(on_cpu=self.device.type == "cpu")
        refuse_unsupported(self.model, self.vllm_config, self.device)
        model_config = self.vllm_config.model_config
        self._expectation = expectation_of(
            model_config.model,
            dtype=model_config.dtype,
            tied_embeddings=bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False)),
        )
        self._loader = VersionLoader(
            self.model, self.vllm_config, self.device, part=self._part, tied=self._expectation.tied
        )
        return checkpoint_specs(model_config.model, model_config.dtype)

    @property
    def _known_loader(self) -> VersionLoader:
        assert self._loader is not None, "the model is known"
        return self._loader

    def shutdown(self) -> None:
        """Leave the publisher. The model keeps the weights it has; idempotent."""
        subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None:
            subscriber.close()

    def _group(self) -> RankGroup:
        tensor_parallel = self.parallel_config.tensor_parallel_size > 1
        return RankGroup(get_tp_group().cpu_group if tensor_parallel else None)

    def _examine(self, fields: Mapping[str, Any]) -> ConnectRequest:
        """What is asked for, if it can be done with this model."""
        request = validated(ConnectRequest, fields)
        if self._refusal is not None:
            raise self._refusal
        self._in_place = request.commit == "in_place"
        if self._in_place:
            refuse_in_place(self.vllm_config.model_config)
        return request

    def _subscribe(self, request: ConnectRequest) -> None:
        assert self._expectation is not None, "examined"
        self._subscriber = type(self).subscriber_type(
            f"{request.replica}/{self.parallel_config.rank}",
            request.rendezvous,
            request.backend,
            request.options,
            self._expectation,
            # In place a rank takes no further bucket before all ranks of the replica have one: all must get the same ones.
            needed=None if self._in_place else self._known_loader.needed(),
            staging_limit_bytes=request.staging_limit_bytes,
            commit=request.commit,
            device=self.device,
        )

    def _prepare(self, change: _Change, fields: Mapping[str, Any]) -> None:
        """What `change` is to load. It stays empty when there is nothing to take back."""
        request = validated(UpdateRequest, fields)
        if request.version is not None:
            change.version, change.before = request.version, self._held
            subscriber = self._subscribed(request.version)
            change.stream = subscriber.take_stream(request.version)
            if change.stream is not None:
                change.stream.begin()
                self._check_complete(request.version, change.stream.specs)
                return
            change.delta = subscriber.take_delta(request.version)
            if change.delta is not None:
                self._check_base(change.delta)
                return
            change.tensors = subscriber.take(request.version)
            self._check_complete(request.version, change.tensors)
            return
        version = request.rollback_of
        assert version is not None, "one of the two is given"
        subscriber = self._subscribed(version)
        if self._held is not None and self._held < version:
            return  # Its load failed, and was undone.
        if self._held != version:
            held = "the weights" if self._held is None else f"version {self._held}"
            raise CommitError(f"version {version} cannot be taken back, {held} came after it.", part=self._part)
        if self._in_place and self._undo is None:
            raise CommitError(
                f"version {version} cannot be taken back, it was written in place.",
                part=self._part,
                hint="Set rollout.commit to staged where memory allows to keep two versions.",
            )
        if self._undo is not None and self._before is not None:
            change.version, change.delta = self._before, self._undo
            return
        self._take_previous(subscriber, change, version, self._before)

    def _check_base(self, delta: LiveDelta) -> None:
        if not self._intact or self._held != delta.base_version:
            held = "unknown weights are" if self._held is None or not self._intact else f"version {self._held} is"
            raise DeltaBaseError(
                f"version {delta.version} is a delta to version {delta.base_version}, {held} here.", part=self._part
            )
        delta.check()

    def _exchange(self, group: RankGroup, change: _Change) -> WeightlaneError | None:
        """Let live elements and those of a delta, or of one that is undone, change places on every rank, or on none."""
        delta, held, undoing = change.delta, self._held, change.delta is self._undo
        assert delta is not None
        self._held, self._intact = None, False
        exchanged = False

        def exchange() -> None:
            nonlocal exchanged
            delta.exchange()
            exchanged = True

        def take_back() -> None:
            if delta.mixed:
                raise CommitError("some of its elements are in the weights.", part=self._part)
            if exchanged:
                delta.exchange()

        error = group.first_error(self._caught(exchange))
        if error is not None:
            trouble = group.first_error(self._caught(take_back))
            if trouble is not None:
                return _mixture(error, f"The version before it could not be put back: {trouble}", self._part)
            self._held, self._intact = held, True
            if not undoing and self._subscriber is not None:
                self._subscriber.restored()
            return error
        self._held, self._intact = change.version, True
        if undoing:
            self._before, self._undo = None, None
            if self._subscriber is not None:
                self._subscriber.restored()
        else:
            self._before, self._undo = change.before, delta
        return None

    def _take_previous(self, subscriber: Subscriber, change: _Change, version: int, wanted: int | None) -> None:
        change.version, change.tensors = subscriber.take_previous(version)
        if change.version != wanted:
            served = "the checkpoint" if wanted is None else f"version {wanted}"
            raise CommitError(
                f"what served before version {version} was {served}; version {change.version} is kept.", part=self._part
            )

    def _replace(self, group: RankGroup, change: _Change) -> WeightlaneError | None:
        """Load on every rank. After a failure the version before is put back; returns the error, and sets `_intact`."""
        began = time.perf_counter()
        held, self._held, self._intact = self._held, None, False
        self._undo = None
        error = group.first_error(self._caught(lambda: self._load(change)))
        if error is None:
            self._held, self._before, self._intact = change.version, change.before, True
            logger.debug(
                "weightlane: version %d loaded in %.4f s (%s)",
                change.version,
                time.perf_counter() - began,
                change.way,
            )
            return None
        if change.before is None:
            return _mixture(error, "No version from before is kept.", self._part)
        self._release(change)
        previous = _Change()

        def take() -> None:
            self._take_previous(self._subscribed(change.version), previous, change.version, held)

        trouble = group.first_error(self._caught(take))
        if trouble is None:
            trouble = group.first_error(self._caught(lambda: self._known_loader.learn_for(previous.tensors, group)))
        if trouble is None:
            trouble = group.first_error(self._caught(lambda: self._load(previous)))
        self._release(previous)
        if trouble is not None:
            return _mixture(error, f"The version before it could not be put back: {trouble}", self._part)
        self._held, self._intact = held, True
        return CommitError(
            f"version {change.version} could not be loaded, version {held} was put back: {error.message}",
            part=error.part,
        )

    def _subscribed(self, version: int) -> Subscriber:
        if self._subscriber is None:
            raise ProtocolError(
                f"version {version} was to be committed before this rank was connected.",
                part=self._part,
                hint="Call init_weight_transfer_engine first.",
            )
        return self._subscriber

    def _check_complete(self, version: int, tensors: Mapping[str, object]) -> None:
        assert self._expectation is not None, "it comes with the subscriber"
        absent = self._expectation.tensors.keys() - tensors.keys() - self._expectation.tied.keys()
        if absent:
            raise ProtocolError(f"version {version} lacks {', '.join(sorted(absent)[:3])}.", part=self._part)

    def _load(self, change: _Change) -> None:
        change.way = self._known_loader.write(change.tensors)
        if self._subscriber is not None:
            # What came quantised is restored from the whole of what is kept: a scale that changes changes its block.
            scatters = self._known_loader.takes_deltas and not are_restored(change.tensors)
            self._subscriber.prepare_delta = self._known_loader.live_delta if scatters else None
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # The staging memory is reused as soon as this returns.

    def _release(self, change: _Change) -> None:
        """The staging memory of `change` is not used any more. Never raises."""
        taken, change.tensors = change.tensors, {}
        if not taken or self._subscriber is None:
            return
        try:
            self._subscriber.release(change.version)
        except Exception as trouble:  # noqa: BLE001 - it fails the next sync, with its own error; this change is done
            logger.warning("weightlane: staging of version %d could not be released: %s", change.version, trouble)

    def _caught(self, step: Callable[[], object]) -> WeightlaneError | None:
        """Run this rank's share of a step and return what it raised: ranks must agree before any of them raises."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - any error must reach the agreement, or the other ranks would hang in it
            return as_weightlane_error(error, self._part)
        return None

    def _raise(self, group: RankGroup, error: WeightlaneError) -> None:
        if group.raises:
            raise RemoteFailureError(RemoteFailure(error, self._intact))

    @property
    def _part(self) -> str:
        return f"rollout rank {self.parallel_config.rank}"


def _mixture(error: WeightlaneError, why: str, part: str) -> QuarantinedError:
    return QuarantinedError(
        f"the weights are a mixture of two versions: {error} {why}",
        part=part,
        peer=error.peer,
        hint="The replica must not serve until a complete version has been committed.",
    )
