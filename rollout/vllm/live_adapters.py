"""`LiveAdapters`: the versions of an adapter that one rank has loaded. All ranks of a replica have the same ones.

A version is a vLLM adapter with an id of its own, so a commit changes nothing that a request computes with: it adds the new one,
and then drops those that nothing uses any more. vLLM 0.32 does the rest, by its source:

* ``LRUCacheWorkerLoRAManager._apply_adapters`` runs before each step with the adapters of the step's requests. One that is loaded
  (in host memory) but in no slot is copied into one, in place of the adapter there whose last step is longest ago. None of the
  same step is replaced, since each is touched when it is its turn.
* ``Scheduler.schedule`` lets no request into a step whose adapter would be one more than ``max_loras``, which is
  `RolloutConfig.adapter_slots`. Such a request waits, and later requests of the adapters in the step overtake it: there is no
  fairness between adapters, so that under constant load it waits until an adapter in the step has no request left.
* A request whose adapter is not loaded ends the engine: vLLM looks for its files. So no request may begin with one that a commit
  in progress drops (`weightlane.rollout.replicas.adapter_versions`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from vllm.logger import init_logger

from weightlane.ckpt_engines import CommitError, ConfigError, WeightlaneError
from weightlane.sync import Subscriber

from ..commit.transfer_calls import UpdateRequest, validated
from ..config import AdapterConfig
from ..contract.rank_group import RankGroup
from ..layout.loading.adapter_tensors import (
    adapted_layers,
    adapter_expectation,
    announced_layers,
    announced_tensors,
)
from ..layout.loading.checkpoint_expectation import renames_of
from ..layout.rank_model import RankModel
from ..vllm_surface import LoRAModel, PEFTHelper, check_attributes

logger = init_logger("vllm.weightlane")


class LiveAdapters:
    """The adapters of one rank, whose model vLLM has wrapped for adapters. All ranks make every call together.

    Versions are sent as `adapter`; an announced version is one of at most its rank, padded with zeros.

    Raises `ConfigError` if the model has a layer for which vLLM has no such adapter.
    """

    in_place = False
    intact = True
    """Whether the adapters are those of complete versions; always, since a failed update changes none."""

    def __init__(self, rank: RankModel, group: RankGroup, adapter: AdapterConfig) -> None:
        self.adapter = adapter
        self._group, self._part = group, rank.part
        self._model = rank.model
        check_attributes(rank.model, "lora_manager", "a model with adapters")
        manager: Any = rank.model.lora_manager
        for path in ("modules", "packed_modules", "lora_config.lora_dtype"):
            check_attributes(manager, path, "the manager of adapters")
        self._manager = manager
        layers = adapted_layers(rank.config.model_config.model, adapter)
        self._layers = frozenset(layers)
        self._peft = peft_settings(manager, adapter, self._layers)
        self.expectation = adapter_expectation(layers, adapter.rank, manager.lora_config.lora_dtype)
        refuse_unknown_layers(manager, self._model, self.expectation.tensors, self._peft, self._part)

    def needed(self) -> None:
        """Every rank needs all of an adapter: vLLM itself takes its part of each tensor."""

    def update(self, fields: Mapping[str, Any], subscriber: Subscriber) -> WeightlaneError | None:
        """Make an `UpdateRequest` with these `fields` on every rank. Returns the first rank's error, or None."""
        requests: list[UpdateRequest] = []
        made: list[Any] = []

        def prepare() -> None:
            request = validated(UpdateRequest, fields)
            if request.adapter is None:
                raise ConfigError(
                    "versions of this replica are adapters, and the update names none.",
                    part=self._part,
                    hint="Only weightlane's own replicas take adapters: LocalReplica or RolloutReplica.",
                )
            if request.version is not None:
                made.append(self._adapter(request.adapter, request.version, subscriber, request.announced))
            elif request.adapter and request.adapter not in self._ids:
                raise CommitError(
                    f"version {request.rollback_of} cannot be rolled back: the adapter before it is no longer loaded.",
                    part=self._part,
                )
            requests.append(request)

        error = self._group.run(prepare, self._part)
        if error is not None:
            return error
        (request,) = requests
        error = self._group.run(lambda: self._add(*made), self._part)
        unused = {adapter.id for adapter in made} if error else self._ids - {request.adapter} - request.in_use
        for adapter in unused:
            self._manager.remove_adapter(adapter)
        return error

    @property
    def _ids(self) -> set[int]:
        return set(self._manager.list_adapters())

    def _adapter(self, identity: int, version: int, subscriber: Subscriber, announced: AdapterConfig | None) -> Any:
        """VLLM's adapter `identity` from the tensors of a staged version, which is released."""
        staged: Mapping[str, torch.Tensor] = subscriber.take(version)
        try:
            peft = self._peft
            if announced is not None:
                layers = announced_layers(self._layers, self.adapter, announced)
                peft = peft_settings(self._manager, announced, layers)
                staged = announced_tensors(staged, layers, announced.rank)
            # Copies: staging memory is used again, and vLLM keeps these tensors and scales B in place.
            tensors = {name: tensor.detach().contiguous().to("cpu", copy=True) for name, tensor in staged.items()}
        finally:
            subscriber.release(version)
        return LoRAModel.from_lora_tensors(
            identity,
            tensors,
            peft,
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            weights_mapper=renames_of(self._model),
        )

    def _add(self, *made: Any) -> None:
        for adapter in made:
            self._manager.add_adapter(adapter)
            # At once and not at the first request: where that failed, the engine would end.
            self._manager.activate_adapter(adapter.id)
            logger.debug("weightlane: adapter %d is in a slot", adapter.id)


def peft_settings(manager: Any, adapter: AdapterConfig, layers: Collection[str]) -> Any:
    """PEFT settings of an adapter for `layers`, which vLLM's `manager` of adapters accepts."""
    peft = PEFTHelper(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=sorted(layers))
    peft.validate_legal(manager.lora_config)
    return peft


def refuse_unknown_layers(manager: Any, model: torch.nn.Module, names: Iterable[str], peft: Any, part: str) -> None:
    """Raise `ConfigError`, from `part`, for layers that vLLM wraps no module for: it would silently leave their tensors out.

    `manager` is vLLM's, of the adapters of `model`; `names` are the tensors of a version; `peft` has its `peft_settings`.
    """
    empty = {name: torch.empty(0) for name in names}
    asked = LoRAModel.from_lora_tensors(1, empty, peft, device="cpu", weights_mapper=renames_of(model)).loras
    known = {*manager.modules, *(name for packed in manager.packed_modules.values() for name in packed)}
    if missing := sorted(asked.keys() - known):
        raise ConfigError(
            f"vLLM has no adapters for {missing[0]}"
            + (f" and {len(missing) - 1} more layers of this model." if missing[1:] else " of this model."),
            part=part,
            hint='Leave such layers out of trainer.lora.targets, or set trainer.lora.publish to "merged".',
        )
