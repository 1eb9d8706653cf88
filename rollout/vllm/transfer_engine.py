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

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightlane.ckpt_engines import WeightlaneError

from ..commit.live_weights import LiveWeights
from ..commit.receiving_rank import ReceivingRank
from ..commit.transfer_calls import DEEP, WEIGHTS, ConnectRequest
from ..contract.rank_group import RankGroup
from ..layout.loading.checkpoint_expectation import checkpoint_specs, expectation_of_config, place_of
from ..layout.loading.refused_models import refuse_in_place, refuse_other_versions, refuse_unsupported
from ..layout.map.layout_map import SourceSpec
from ..layout.proof.model_tensors import tensors_of
from ..layout.rank_model import RankModel
from ..layout.version_loader import VersionLoader
from ..vllm_cpu.sleep import cache_storages, drop_pages
from ..vllm_surface import (
    Worker,
    check_attributes,
    check_internals,
    get_layerwise_info,
    get_tp_group,
    set_current_vllm_config,
)
from .live_adapters import LiveAdapters


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped to us
    """The fields of a connect call, validated later, when all ranks can agree on the outcome."""

    fields: Mapping[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is untyped to us
    """The fields of an update call, validated later, when all ranks can agree on the outcome."""

    fields: Mapping[str, Any]


def _worker_class(device: torch.device) -> Any:
    """The class of vLLM's workers on `device`."""
    if device.type == "cpu":
        from ..vllm_surface import CPUWorker  # noqa: PLC0415 - only in vLLM's CPU build

        return CPUWorker
    return Worker


def _let_workers_sleep(worker_class: Any) -> None:
    """Let workers of `worker_class` that use weightlane sleep by `WeightlaneTransferEngine.fall_asleep` and `wake`."""
    plain_sleep, plain_wake = worker_class.sleep, worker_class.wake_up
    if getattr(plain_sleep, "of_weightlane", False):  # by the engine of an earlier model in this process
        return

    @functools.wraps(plain_sleep)
    def sleep(worker: Any, level: int = 1) -> None:
        engine = worker.weight_transfer_engine
        if isinstance(engine, WeightlaneTransferEngine):
            engine.fall_asleep(worker, level, plain_sleep)
        else:
            plain_sleep(worker, level)

    @functools.wraps(plain_wake)
    def wake_up(worker: Any, tags: Sequence[str] | None = None) -> None:
        engine = worker.weight_transfer_engine
        if isinstance(engine, WeightlaneTransferEngine):
            engine.wake(worker, tags, plain_wake)
        else:
            plain_wake(worker, tags)

    sleep.of_weightlane = True  # type: ignore[attr-defined]
    worker_class.sleep, worker_class.wake_up = sleep, wake_up


class KeptTensors:
    """Copies, in the host's memory, of the tensors of a model that would be lost with its memory and that no version has.

    These are tables of rotary embeddings, scales, and tensors of layers that go through vLLM's own loading. `replaced` are the
    storages that the next version writes completely, by torch's ids.
    """

    def __init__(self, model: torch.nn.Module, replaced: Collection[int]) -> None:
        self._copies = [
            (tensor, tensor.detach().to("cpu", copy=True))
            for tensor in tensors_of(model).values()
            if tensor.numel() and not tensor.is_meta and tensor.untyped_storage()._cdata not in replaced
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies into the tensors, whose memory is there again."""
        for tensor, copy in self._copies:
            tensor.data.copy_(copy)
        self._copies = []


class WeightlaneTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]  # vLLM is untyped to us
    """The transfer engine of one rollout rank. vLLM creates it after the model is loaded, and calls it between decode steps."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        rank, world = self.parallel_config.rank, self.parallel_config.tensor_parallel_size
        self._rank = ReceivingRank(rank, world, RankGroup(get_tp_group().cpu_group if world > 1 else None), device)
        self._refusal = self._learn()
        """The reason why this model takes no versions; None if it takes them."""
        self._update: Mapping[str, Any] | None = None
        """The update that `finish_weight_update` makes. All ranks have one, or none."""
        self._kept: KeptTensors | None = None
        """Tensors that a deep sleep on a GPU would lose, and no version has."""

    @property
    def has_update(self) -> bool:
        """Whether `finish_weight_update` would change the weights."""
        return self._update is not None

    @property
    def version(self) -> int | None:
        """The version of the weights; None for a checkpoint's, for a mixture, and where versions are adapters."""
        return self._rank.updatable.version if isinstance(self._rank.updatable, LiveWeights) else None

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """Accept any fields: vLLM calls this where ranks cannot agree on an outcome, so it must not raise."""
        return InitInfo(init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        """Accept any fields, as `parse_init_info`."""
        return UpdateInfo(update_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Subscribe to the publisher in `init_info`. Raises as `ReceivingRank.connect`."""
        self._rank.connect(init_info.fields, self._accept)

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
        error = self._rank.check_update(update_info.fields)
        self._update = update_info.fields if error is None else None
        if error is not None:
            self._rank.report(error)

    def commit_update(self, fields: Mapping[str, Any]) -> None:
        """Commit a version, or roll one back. Raises as `ReceivingRank.update`."""
        self._rank.update(fields)

    def fall_asleep(self, worker: Any, level: int, plain: Callable[[Any, int], None]) -> None:
        """Let this rank's `worker` free its memory, on a GPU by vLLM's own sleep, `plain`. Runs between two decode steps.

        A deep sleep loses the weights that versions write; everything else is there again after `wake`.
        """
        deep = level >= DEEP
        updatable = self._rank.updatable
        replaced = updatable.loader.replaced_storages() if deep and isinstance(updatable, LiveWeights) else {}
        self._rank.fell_asleep(lost=deep)
        if self.device.type == "cpu":
            drop_pages([*cache_storages(worker).values(), *replaced.values()])
            return
        self._kept = KeptTensors(self.model, replaced) if deep else None
        plain(worker, level)

    def wake(self, worker: Any, tags: Sequence[str] | None, plain: Callable[[Any, Sequence[str] | None], None]) -> None:
        """Let this rank's `worker` take memory back, on a GPU by vLLM's own, `plain`; `tags` are vLLM's: None means all."""
        if self.device.type != "cpu":
            plain(worker, tags)
        if tags is None or WEIGHTS in tags:
            kept, self._kept = self._kept, None
            if kept is not None:
                kept.restore()
                torch.accelerator.synchronize(self.device)
            self._rank.woke()

    def shutdown(self) -> None:
        """Leave the publisher. The model keeps its weights. Idempotent."""
        self._update = None
        self._rank.leave()

    def _learn(self) -> WeightlaneError | None:
        """Find out how versions like the checkpoint are written; returns the reason if they cannot be.

        Before the model serves there is room for a second model, and no request waits.
        """
        group, part = self._rank.group, self._rank.part
        if self.vllm_config.lora_config is not None:
            return group.run(self._check_model, part)  # weights stay, so there is nothing to learn
        loaders: list[VersionLoader] = []
        specs: dict[str, SourceSpec] = {}

        def examine() -> None:
            self._check_model()
            model_config = self.vllm_config.model_config
            expectation = replace(expectation_of_config(model_config), place=place_of(self.model))
            loaders.append(VersionLoader(self._rank_model(), expectation=expectation))
            specs.update(checkpoint_specs(model_config.model, model_config.dtype))

        with set_current_vllm_config(self.vllm_config):
            error = group.run(examine, part)
            if error is None:
                self._rank.updatable = LiveWeights(loaders[0], group)
                error = group.run(lambda: loaders[0].learn(specs, group), part)
        return error

    def _check_model(self) -> None:
        check_internals(on_cpu=self.device.type == "cpu")
        _let_workers_sleep(_worker_class(self.device))
        check_attributes(get_layerwise_info(self.model), "restore_metadata", "get_layerwise_info")
        for setting in ("cudagraph_mode", "static_forward_context", "static_all_moe_layers"):
            check_attributes(self.vllm_config.compilation_config, setting, "the compilation config")
        refuse_unsupported(self.model, self.vllm_config, self.device)

    def _rank_model(self) -> RankModel:
        return RankModel(self.model, self.vllm_config, self.device, self._rank.part)

    def _accept(self, request: ConnectRequest) -> None:
        """Raise `ConfigError` if this model cannot do what `request` asks for."""
        self._update = None  # of the publisher that this rank has left
        if self._refusal is not None:
            raise self._refusal
        if request.commit == "in_place":
            refuse_in_place(self.vllm_config.model_config)
        refuse_other_versions(self.vllm_config, adapter=request.adapter is not None)
        if request.adapter is not None and self._rank.updatable is None:
            self._rank.updatable = LiveAdapters(self._rank_model(), self._rank.group, request.adapter)
