"""`Adapters`: all adapters of a rank, the active ones, and the published one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.box import Box
from weightlane.sync.version.tensor_spec import LocalShard

from ...config import LoraConfig, TrainerConfig
from ..contract import Fence, StatePart
from ..rank_collectives import share_json
from .adapter import Adapter, LoraGroups, LoraPair
from .joint import JointPairs, LayerPair
from .peft_files import read_peft
from .published import (
    adapter_names,
    adapter_shards,
    check_carries,
    copy_padded,
    is_target,
    merge_slice,
)
from .saved import SavedAdapters
from .sites import DEFAULT, PART, LoraSite, check_name, chosen_sites

PairOf = Callable[[str], LayerPair | None]
"""Function that returns the active A and B of a layer, given by name; None for none."""


class AdaptedModel(Protocol):
    """One rank's part of a model, provided by an engine, that can have adapters."""

    @property
    def groups(self) -> LoraGroups:
        """The process groups over which gradients and norms are summed."""

    def install(self, pair_of: PairOf) -> tuple[list[LoraSite], dict[str, tuple[int, int]]]:
        """Make every layer add the output of the A and B that `pair_of` returns for it to its own. Called at most once.

        Returns:
            The layers on this rank that can have adapters, and the numbers of outputs and inputs of such layers on all ranks, by
            name, in the order of the checkpoint.
        """

    @property
    def weights(self) -> Mapping[str, tuple[str, int]]:
        """The layer whose weight each checkpoint tensor is, and the tensor's first row there; on all ranks, in order."""


class Adapters:
    """The adapters of one rank's part of a model, on `device`. The model is unchanged until there is an adapter."""

    def __init__(self, trainer: TrainerConfig, model: AdaptedModel, rank: int, device: torch.device) -> None:
        self._trainer, self._model = trainer, model
        self._rank, self._device = rank, device
        self._layers: tuple[list[LoraSite], dict[str, tuple[int, int]]] | None = None
        self._adapters: dict[str, Adapter] = {}
        self._active: Sequence[tuple[Adapter | None, int]] = ()
        """The adapters that the model computes with now; if there are several, each with its number of tokens."""
        self._merged: dict[
            tuple[str, Sequence[int], torch.dtype], tuple[LoraPair, Box, torch.Tensor, torch.Tensor]
        ] = {}
        """The published weights, by name, place and dtype: the same tensor, whose storage never moves, whenever one is asked for.

        Each is beside what `merge_slice` computes it from: always the model's own weight, so no error accumulates over steps.
        """
        if trainer.lora is not None:
            self.keep(self.make(DEFAULT, trainer.lora, None, trained=not trainer.frozen))

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the order in which adapters were added."""
        return tuple(self._adapters)

    @property
    def _own(self) -> str:
        """Name of the adapter that saved states and exports merge into the model: that of ``trainer.lora``, if it is trained."""
        return DEFAULT if DEFAULT in self._trained and self._trainer.lora is not None else ""

    @property
    def _trained(self) -> dict[str, Adapter]:
        """The adapters that have an optimizer."""
        return {name: adapter for name, adapter in self._adapters.items() if adapter.trained}

    def chosen(self, name: str | None) -> Adapter | None:
        """Return the adapter `name`; None for "", the model's own weights.

        If `name` is None, it is the adapter of ``trainer.lora``, if there is one.
        """
        if name is None:
            name = DEFAULT if self._trainer.lora is not None else ""
        if not name:
            return None
        if name not in self._adapters:
            raise ConfigError(
                f"there is no adapter {name!r}.",
                part=PART,
                hint=f"Known adapters: {', '.join(self._adapters) or 'none'}; make one by add_adapter.",
            )
        return self._adapters[name]

    def make(
        self, name: str, config: LoraConfig, source: Path | None, *, trained: bool = True, replace: bool = False
    ) -> Adapter:
        """Make an adapter as described in `AdapterEngine.add_adapter`, without adding it to these."""
        check_name(name)
        published = self._trainer.lora is not None and name == DEFAULT  # a publisher reads its tensors
        if name in self._adapters and (published or not replace):
            raise ConfigError(f"there is an adapter {name!r} already.", part=PART, hint="Remove it, or choose a name.")
        if self._layers is None:
            self._layers = self._model.install(self._pair)
        sites = chosen_sites(self._layers[0], config)
        values = None if source is None else read_peft(source, config, sites, self._layers[1])
        where = self._device, self._model.groups
        return Adapter(name, config, self._trainer, sites, values, *where, trained=trained)

    def keep(self, adapter: Adapter) -> None:
        """Add `adapter` to these, or replace the one of its name."""
        self._adapters[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """See `AdapterEngine.remove_adapter`."""
        adapter = self.chosen(name)
        if adapter is None or (self._trainer.lora is not None and name == DEFAULT):
            raise ConfigError(
                f"adapter {name!r} cannot be removed: it is what is trained and published.",
                part=PART,
                hint="Remove one that add_adapter made.",
            )
        del self._adapters[name]

    @contextmanager
    def active_runs(self, runs: Sequence[tuple[Adapter | None, int]]) -> Iterator[None]:
        """Make the model compute inside the block with adapters, each for its run of tokens in a packed pass; one for all tokens.

        None stands for a run that only the model's own weights compute.
        """
        self._active = runs
        try:
            yield
        finally:
            self._active = ()

    def _pair(self, module: str) -> LayerPair | None:
        """Return the active A and B of a layer; None if it has none."""
        runs = [(None if adapter is None else adapter.pairs.get(module), tokens) for adapter, tokens in self._active]
        if len(runs) == 1:
            return runs[0][0]
        return JointPairs(runs) if any(pair is not None for pair, _ in runs) else None

    def published_names(self, adapter: Adapter) -> list[str]:
        """List the published tensors that steps of `adapter` change, on any rank; empty unless it is that of ``trainer.lora``."""
        if self._trainer.lora is None or adapter.name != DEFAULT:
            return []
        if self._trainer.publishes_adapter:
            return adapter_names(self._all_layers, adapter.config)
        return [name for name, (module, _) in self._model.weights.items() if is_target(module, adapter.config)]

    def load_published(self, name: str, before_change: Fence) -> None:
        """See `AdapterEngine.load_published`."""
        adapter = self.chosen(name)
        if adapter is None or not self._trainer.publishes_adapter:
            what = "the model's own weights" if adapter is None else f"adapter {name!r}"
            why = "" if self._trainer.publishes_adapter else ", since versions are weights"
            raise ConfigError(
                f"{what} cannot be published as an adapter{why}.",
                part=PART,
                hint='Set trainer.lora.publish to "adapter", and name an adapter.',
            )
        published = self._adapters[DEFAULT]
        if adapter is published:
            return
        if published.step or published.denominators is not None:
            raise ConfigError(
                f"adapter {name!r} would be published in the place of {DEFAULT!r}, which is trained itself.",
                part=PART,
                hint="Set trainer.frozen, and train other adapters only.",
            )
        check_carries(published.config, adapter.config, self._all_layers, name)
        before_change(adapter_names(self._all_layers, published.config))
        copy_padded(adapter, published)

    def shards(self, wire_dtype: torch.dtype) -> list[LocalShard]:
        """The parts of the published adapter that this rank holds; see `TrainingEngine.local_shards`."""
        return adapter_shards(self._adapters[DEFAULT], self._all_layers, wire_dtype)

    def merged(self, own: Sequence[LocalShard]) -> list[LocalShard]:
        """This rank's shards of the model's own weights, with the adapter of ``trainer.lora`` added, as they are published."""
        found = []
        for shard in own:
            if (place := self._place(shard)) is None:
                found.append(shard)
                continue
            key = shard.spec.name, tuple(shard.starts), shard.spec.dtype
            if key not in self._merged:
                merged = torch.empty_like(shard.data, dtype=shard.spec.dtype, memory_format=torch.contiguous_format)
                self._merged[key] = (*place, shard.data, merged)
                merge_slice(*self._merged[key])
            found.append(replace(shard, data=self._merged[key][-1]))
        return found

    def exported(self, shard: LocalShard) -> torch.Tensor:
        """Return the values with which a slice of the weights is exported: with the adapter of ``trainer.lora`` added."""
        place = self._place(shard) if self._own else None
        return shard.data if place is None else merge_slice(*place, shard.data)

    def _place(self, shard: LocalShard) -> tuple[LoraPair, Box] | None:
        """The A and B of ``trainer.lora`` beside the weight of which `shard` is a slice, and which; None if it has none."""
        module, row = self._model.weights.get(shard.spec.name, ("", 0))
        pair = self._adapters[DEFAULT].pairs.get(module)
        if pair is None or not shard.box.numel:
            return None
        return pair, shard.box.with_axis(0, row + shard.starts[0], len(shard.data))

    @property
    def _all_layers(self) -> dict[str, tuple[int, int]]:
        assert self._layers is not None, "there is an adapter"
        return self._layers[1]

    def memory_of(self, part: StatePart) -> list[torch.Tensor]:
        """List the tensors of `part` of the state of all adapters, merged weights included."""
        found = [tensor for adapter in self._adapters.values() for tensor in adapter.memory_of(part)]
        return [*found, *(merged for *_, merged in self._merged.values() if part == "parameters")]

    def complete_step(self, adapter: Adapter) -> None:
        """Share a step's results among the ranks, and recompute the merged weights if they have this adapter. Collective."""
        adapter.share_steps()
        if self.published_names(adapter):
            self.refresh()

    def refresh(self) -> None:
        """Recompute the merged weights, if there are any, after the adapter or the model's weights changed."""
        for each in self._merged.values():
            merge_slice(*each)

    def gathered(self, name: str) -> dict[str, torch.Tensor]:
        """Gather the full tensors of adapter `name`, by `AdapterSlice.key`, on rank 0; empty on other ranks. Collective.

        The first rank that holds a part sends it. A rank sends all its parts in one message.
        """
        mine = list(self._adapters[name].slices())
        held = share_json([[piece.key, list(piece.shape), piece.box.to_plain()] for piece in mine], self._device)
        full: dict[str, torch.Tensor] = {}
        taken: set[str] = set()
        for owner, described in enumerate(held):
            fresh = [number for number, (key, _, box) in enumerate(described) if f"{key} {box}" not in taken]
            taken |= {f"{described[number][0]} {described[number][2]}" for number in fresh}
            if not fresh or self._rank not in (0, owner):
                continue
            boxes = [Box.from_plain(described[number][2]) for number in fresh]
            flat = torch.empty(sum(box.numel for box in boxes), device=self._device)
            if self._rank == owner:
                flat = torch.cat([mine[number].data.flatten() for number in fresh])
            if owner != 0:
                if self._rank == owner:
                    dist.send(flat, 0)
                else:
                    dist.recv(flat, owner)
            if self._rank == 0:
                for number, box, part in zip(
                    fresh, boxes, torch.split(flat, [box.numel for box in boxes]), strict=True
                ):
                    key, shape, _ = described[number]
                    full.setdefault(key, torch.empty(shape))[box.index] = part.view(box.shape).cpu()
        return full

    def to_save(self) -> SavedAdapters:
        """Gather the adapters' part of a saved state; tensors on rank 0 only. Collective."""
        trained = self._trained
        return SavedAdapters(
            {name: (adapter.config, adapter.step) for name, adapter in trained.items()},
            {f"{name}|{key}": tensor for name in trained for key, tensor in self.gathered(name).items()},
            self._own,
        )

    def check(self, saved: SavedAdapters, directory: Path) -> None:
        """Raise `ConfigError` unless `saved`, which was read from `directory`, has exactly these adapters."""
        saved.refuse_others({name: adapter.config for name, adapter in self._trained.items()}, self._own, directory)
        if self._layers is not None:
            saved.refuse_layers_beyond(self._layers[1], directory)
        for name, adapter in self._trained.items():
            for piece in adapter.slices():
                whole = saved.tensors.get(f"{name}|{piece.key}")
                if whole is None or tuple(whole.shape) != piece.shape:
                    raise ConfigError(
                        f"the training state in {directory} does not fit this model: it lacks adapter {name!r}'s {piece.key}.",
                        part=PART,
                        hint="Check model and path.",
                    )

    def restore(self, saved: SavedAdapters, *, optimizer: bool) -> None:
        """Take values from `saved`, which `check` accepted, and with `optimizer` moments and steps, else 0; drop gradients."""
        for name, adapter in self._trained.items():
            for piece in adapter.slices():
                if optimizer or piece.key.endswith("|weight"):
                    piece.data.copy_(saved.tensors[f"{name}|{piece.key}"][piece.box.index])
                else:
                    piece.data.zero_()
            adapter.set_step(saved.about[name][1] if optimizer else 0)
            adapter.clear_gradients()
        self.refresh()
