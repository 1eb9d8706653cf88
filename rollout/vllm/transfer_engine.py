"""`WeightlaneTransferEngine`: vLLM's weight-transfer engine ``weightlane``, one in each worker process.

Versions are staged by a `weightlane.sync.Subscriber` on its own thread while the worker generates. vLLM's weight-transfer calls
therefore carry only control messages, and one call makes a complete commit::

    init_weight_transfer_engine({"rendezvous": {...}, "replica": "rollout-0", "backend": "shm", "options": {}, ...})
    update_weights({"version": 7, "engine_commit": {"weight_version": "7"}})

See `commit_in_core` for that, and for vLLM's own three calls, which make the same commit. An update that is never finished is
dropped at the next ``start_weight_update``. ``update_weights({"rollback_of": 7, ...})`` rolls version 7 back in the same way.

With ``"commit": "in_place"`` nothing is staged: the commit itself receives the version, and writes one bucket after the
other into the parameters. A failure before the first write leaves the old weights in place, a later one leaves a mixture.

Any client can make these calls, including an HTTP client of a stock server. A failed commit raises; its text says
whether the old weights are in place, bit for bit, on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightlane.ckpt_engines import ProtocolError, ReplicaTakenError, WeightlaneError
from weightlane.sync import Subscriber

from ..commit.remote_failure import RemoteFailureError
from ..commit.transfer_calls import RANKS, ConnectRequest, UpdateRequest, replica_scope, validated
from ..layout.loading.checkpoint_expectation import checkpoint_specs, expectation_of_config, place_of
from ..layout.loading.refused_models import refuse_in_place, refuse_other_versions, refuse_unsupported
from ..layout.map.layout_map import SourceSpec
from ..layout.rank_model import RankModel
from ..layout.version_loader import VersionLoader
from ..rank_group import RankGroup
from ..vllm_surface import check_attributes, check_internals, get_layerwise_info, get_tp_group, set_current_vllm_config
from .live_adapters import LiveAdapters
from .live_weights import LiveWeights


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped to us
    """The fields of a connect call, validated later, when all ranks can agree on the outcome."""

    fields: Mapping[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is untyped to us
    """The fields of an update call, validated later, when all ranks can agree on the outcome."""

    fields: Mapping[str, Any]


class WeightlaneTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]  # vLLM is untyped to us
    """The transfer engine of one rollout rank. vLLM creates it after the model is loaded, and calls it between decode steps."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._part = f"rollout rank {self.parallel_config.rank}"
        self._group = RankGroup(get_tp_group().cpu_group if self.parallel_config.tensor_parallel_size > 1 else None)
        self._subscriber: Subscriber | None = None
        self._publisher: Mapping[str, Any] = {}
        """Address of the publisher that this rank was subscribed to last."""
        self._weights: LiveWeights | LiveAdapters | None = None
        """None if the model takes no versions, and before the first connection of a replica with adapters. The weights outlive a
        connection, and keep what is known of the model."""
        self._refusal = self._learn()
        """The reason why this model takes no versions; None if it takes them."""
        self._update: Mapping[str, Any] | None = None
        """The update that `finish_weight_update` makes. All ranks have one, or none."""

    @property
    def has_update(self) -> bool:
        """Whether `finish_weight_update` would change the weights."""
        return self._update is not None

    @property
    def version(self) -> int | None:
        """The version of the weights; None for a checkpoint's, for a mixture, and where versions are adapters."""
        return self._weights.version if isinstance(self._weights, LiveWeights) else None

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """Accept any fields: vLLM calls this where ranks cannot agree on an outcome, so it must not raise."""
        return InitInfo(init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        """Accept any fields, as `parse_init_info`."""
        return UpdateInfo(update_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Leave the publisher that this rank is subscribed to, if any, and subscribe to the one in `init_info`.

        Raises:
            RemoteFailureError: With `ReplicaTakenError` where another publisher lives that is not to be left; every rank stays
                subscribed to it. With `ConfigError` or the subscriber's error; no rank stays subscribed.
        """
        if error := self._group.run(lambda: self._refuse_second(init_info.fields), self._part):
            self._raise(error)
            return
        self.shutdown()
        checked: list[ConnectRequest] = []
        error = self._group.run(lambda: checked.append(self._checked(init_info.fields)), self._part)
        if error is None:
            error = self._group.run(lambda: self._subscribe(checked[0]), self._part)
        if error is not None:
            self.shutdown()
            self._raise(error)

    def start_weight_update(self) -> None:
        """Drop an update that was never finished."""
        self._update = None

    def finish_weight_update(self) -> None:
        """Commit the update that `receive_weights` has accepted, if there is one. Raises as `commit_update`."""
        update, self._update = self._update, None
        if update is not None:
            self.commit_update(update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Accept an update, as `receive_weights`."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Accept the update that `finish_weight_update` is to make: a version to commit, or one to roll back.

        Raises:
            RemoteFailureError: The update is invalid, or no publisher is connected. The old weights are in place.
        """
        error = self._group.run(lambda: self._check_update(update_info.fields), self._part)
        self._update = update_info.fields if error is None else None
        if error is not None:
            self._raise(error)

    def commit_update(self, fields: Mapping[str, Any]) -> None:
        """Commit the version ``fields["version"]``, or roll back ``fields["rollback_of"]``.

        No rank begins before every rank has everything that it needs.

        Raises:
            RemoteFailureError: With the first rank's typed error, and whether the old weights are in place.
        """
        weights, subscriber = self._weights, self._subscriber
        if weights is None or subscriber is None:  # True on all ranks or on none, since ranks connect together.
            error = self._group.run(lambda: self._check_update(fields), self._part)
        else:
            error = weights.update(fields, subscriber)
        if error is not None:
            self._raise(error)

    def shutdown(self) -> None:
        """Leave the publisher. The model keeps its weights. Idempotent."""
        self._update = None
        subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None:
            subscriber.close()

    def _learn(self) -> WeightlaneError | None:
        """Find out how versions like the checkpoint are written; returns the reason if they cannot be.

        Before the model serves there is room for a second model, and no request waits.
        """
        specs: dict[str, SourceSpec] = {}
        if self.vllm_config.lora_config is not None:
            return self._group.run(self._check_model, self._part)  # weights stay, so there is nothing to learn
        with set_current_vllm_config(self.vllm_config):
            error = self._group.run(lambda: specs.update(self._examine_model()), self._part)
            if error is None:
                assert isinstance(self._weights, LiveWeights), "examined"
                loader = self._weights.loader
                error = self._group.run(lambda: loader.learn(specs, self._group), self._part)
        return error

    def _examine_model(self) -> dict[str, SourceSpec]:
        """Create `_weights`, or raise the reason against it; returns the tensors of the checkpoint as they are usually sent."""
        self._check_model()
        model_config = self.vllm_config.model_config
        expectation = replace(expectation_of_config(model_config), place=place_of(self.model))
        rank = self._rank_model()
        loader = VersionLoader(rank, expectation=expectation)
        self._weights = LiveWeights(rank, loader, self._group)
        return checkpoint_specs(model_config.model, model_config.dtype)

    def _check_model(self) -> None:
        check_internals(on_cpu=self.device.type == "cpu")
        check_attributes(get_layerwise_info(self.model), "restore_metadata", "get_layerwise_info")
        for setting in ("cudagraph_mode", "static_forward_context", "static_all_moe_layers"):
            check_attributes(self.vllm_config.compilation_config, setting, "the compilation config")
        refuse_unsupported(self.model, self.vllm_config, self.device)

    def _rank_model(self) -> RankModel:
        return RankModel(self.model, self.vllm_config, self.device, self._part)

    def _checked(self, fields: Mapping[str, Any]) -> ConnectRequest:
        """The validated request; raises `ConfigError` if this model cannot do what it asks for."""
        request = validated(ConnectRequest, fields)
        if self._refusal is not None:
            raise self._refusal
        if request.commit == "in_place":
            refuse_in_place(self.vllm_config.model_config)
        refuse_other_versions(self.vllm_config, adapter=request.adapter is not None)
        if request.adapter is not None and self._weights is None:
            self._weights = LiveAdapters(self._rank_model(), self._group, request.adapter)
        return request

    def _refuse_second(self, fields: Mapping[str, Any]) -> None:
        """Raise `ReplicaTakenError` if this rank follows another publisher that lives, unless `fields` take it over."""
        follows = self._subscriber is not None and not self._subscriber.run_over
        if follows and fields.get("rendezvous") != self._publisher and fields.get("take_over") is not True:
            where = f"{self._publisher.get('host')}:{self._publisher.get('port')}"
            raise ReplicaTakenError(
                f"this server follows another publisher, at {where}, which lives.",
                part=self._part,
                hint="End that program, or take the server over: ServerReplica(..., take_over=True).",
            )

    def _subscribe(self, request: ConnectRequest) -> None:
        assert self._weights is not None, "refused otherwise"
        self._weights.in_place = request.commit == "in_place"
        self._publisher = request.rendezvous
        self._subscriber = Subscriber(
            f"{request.replica}/{self.parallel_config.rank}",
            request.rendezvous,
            request.backend,
            request.options,
            self._weights.expectation,
            # In place a rank takes the next bucket only when all ranks have one: all must get the same buckets.
            needed=None if self._weights.in_place else self._weights.needed(),
            staging_limit_bytes=request.staging_limit_bytes,
            commit=request.commit,
            device=self.device,
        )
        if self.parallel_config.rank == 0:
            mailbox = self._subscriber.rendezvous.mailbox(replica_scope(request.replica))
            mailbox.put(RANKS, self.parallel_config.tensor_parallel_size)

    def _check_update(self, fields: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless `fields` are an `UpdateRequest`, and `ProtocolError` before this rank was connected."""
        request = validated(UpdateRequest, fields)
        if self._weights is None or self._subscriber is None:
            version = request.rollback_of if request.version is None else request.version
            raise ProtocolError(
                f"version {version} was to be committed before this rank was connected.",
                part=self._part,
                hint="Call init_weight_transfer_engine first.",
            )

    def _raise(self, error: WeightlaneError) -> None:
        """Raise `error` on the rank that reports failures."""
        if self._group.raises:
            raise RemoteFailureError(error, intact=self._weights is None or self._weights.intact)
