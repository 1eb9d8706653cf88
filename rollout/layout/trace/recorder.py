"""`CopyRecorder`: records the copies into live parameters that a loading makes, and refuses everything that is no copy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..map.geometry import (
    Cover,
    Dimensions,
    joined_copies,
    overlaps_itself,
    simplified_copy,
    target_block,
    without_broadcasts,
)
from ..map.layout_map import Constant, LayoutCopy, LayoutMap, Refusal, TargetSpec
from .origins import Computed, Filled, Origins, offset_of, storage_of, storage_positions

_MOST_COPIES = 1 << 14
"""Most copies that one tensor may become: more would take long to find, and to make in every commit."""
_SAMPLE = 1 << 20
"""Most steps that are counted to find the commonest one: counting all would take long for large tensors."""


class CopyRecorder:
    """The copies, constants and refusals of one loading into a live model, which nothing here changes."""

    def __init__(self, model: torch.nn.Module, origins: Origins) -> None:
        self._origins = origins
        self._live: dict[str, torch.Tensor] = {}
        self._targets: dict[int, str] = {}
        self._parameters = {name for name, _ in model.named_parameters()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            # The first name of a storage stands for all views of it.
            if tensor.numel() and storage_of(tensor) not in self._targets:
                self._targets[storage_of(tensor)] = name
                self._live[name] = tensor
        self._copies: list[LayoutCopy] = []
        self._constants: list[tuple[int, Constant]] = []
        """Each with the number of copies made before it."""
        self.written: set[str] = set()
        self._refused: dict[str, str] = {}
        self._refused_sources: dict[str, str] = {}
        self._feeds: set[tuple[str, str]] = set()

    def target_of(self, tensor: torch.Tensor) -> str | None:
        """The live parameter or buffer that `tensor` is a view of; None for other tensors."""
        return self._targets.get(storage_of(tensor))

    def refuse(self, target: str, why: str, sources: Iterable[str] = ()) -> None:
        """Note why a parameter gets something other than copies, and of which tensors; the first reason stays."""
        self._refused.setdefault(target, why)
        self._feeds |= {(source, target) for source in sources}

    def refuse_source(self, source: str, why: str) -> None:
        """Note why a checkpoint tensor cannot be copied; the first reason stays."""
        self._refused_sources.setdefault(source, why)

    def copy(self, target: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Record that `source` is copied into `destination`, a view of `target`."""
        origin, live, origins = self._origins.of(source), self._live[target], self._origins
        self.written.add(target)
        view = (offset_of(destination), tuple(destination.stride()), tuple(destination.size()))
        if (other := self.target_of(source)) is not None:
            self.refuse(target, f"it is copied from {other}")
        elif origin is None:
            self.refuse(target, "it gets values that are not the checkpoint's")
        elif isinstance(origin, Filled) and destination.dtype == live.dtype:
            self._constants.append((len(self._copies), Constant(target, *view, origin.value)))
        elif isinstance(origin, Computed):
            self.refuse(target, origin.why, origin.sources)
        elif destination.dtype != live.dtype or overlaps_itself(view):
            why = "it is written through a view of another dtype or of overlapping elements"
            self.refuse(target, why, origins.sources_of(source))
        elif origins.dtype(source) != source.dtype:
            why = f"bits of {origins.dtype(source)} are read as {source.dtype}"
            self.refuse(target, why, origins.sources_of(source))
        elif source.dtype != destination.dtype and origins.was_cast(source):
            self.refuse(target, f"it is cast to {source.dtype} before it is copied", origins.sources_of(source))
        elif not self._copy_view(target, destination, source.expand(destination.size())):
            self._copy_elements(target, destination, source.expand(destination.size()))

    def fill(self, target: str, written: torch.Tensor, value: float) -> bool:
        """Record that a view of `target` is filled with `value`; False, recording nothing, if the view has another dtype."""
        if written.dtype != self._live[target].dtype:
            return False
        self.written.add(target)
        block = (offset_of(written), tuple(written.stride()), tuple(written.size()))
        self._constants.append((len(self._copies), Constant(target, *block, value)))
        return True

    def layout(self, failed: Mapping[str, str]) -> LayoutMap:
        """Everything that was recorded; `failed` says why tensors could not be loaded without data."""
        constants = self._lasting_constants()
        wanted = (self._live.keys() & self._parameters) | self.written | self._refused.keys()
        return LayoutMap(
            sources=self._origins.specs,
            targets={name: TargetSpec.of(tensor) for name, tensor in self._live.items() if name in wanted},
            copies=joined_copies(self._copies),
            constants=constants,
            refused_sources=[Refusal(*item) for item in {**self._refused_sources, **failed}.items()],
            refused_targets=[Refusal(*item) for item in self._refused.items()],
            feeds=sorted(self._feeds),
        )

    def _copy_view(self, target: str, destination: torch.Tensor, source: torch.Tensor) -> bool:
        """Record a copy of one view of a checkpoint tensor; False if `source` is none."""
        if (found := self._origins.view_of_source(source)) is None:
            return False
        name, offset, strides = found
        dimensions = list(zip(destination.size(), strides, destination.stride(), strict=True))
        repeats = math.prod(length for length, step, _ in dimensions if step == 0)
        read = tuple(step for _, step, _ in dimensions if step), tuple(n for n, step, _ in dimensions if step)
        if repeats > _MOST_COPIES or overlaps_itself((0, *read)):
            self.refuse(target, f"elements of {name} are repeated in it", [name])
            return True
        for start, rest in without_broadcasts(offset_of(destination), dimensions):
            self._copies.append(simplified_copy(name, offset, target, start, rest))
        return True

    def _copy_elements(self, target: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Record copies of rearranged elements as few strided copies."""
        with _disable_current_modes():
            places = storage_positions(destination.size(), destination.stride(), offset_of(destination)).flatten()
            found = self._origins.element_numbers(source)
            if found is None:
                why = "part of it is filled with something that is not the checkpoint's"
                self.refuse(target, why, self._origins.sources_of(source))
                return
            for name, mask, numbers in found:
                order = places[mask].argsort()
                runs = strided_runs(places[mask][order], numbers[order])
                if runs is None:
                    why = f"elements of {name} are scattered over it"
                    self.refuse(target, why, self._origins.sources_of(source))
                    return
                self._copies += [simplified_copy(name, start, target, offset, dims) for start, offset, dims in runs]

    def _lasting_constants(self) -> list[Constant]:
        """The constants that no copy covers completely. Refuses targets in which a constant overwrites a copy."""
        remaining: list[Constant] = []
        for before, constant in self._constants:
            block = (constant.offset, constant.strides, constant.shape)
            copies = [
                (at, target_block(copy)) for at, copy in enumerate(self._copies) if copy.target == constant.target
            ]
            cover = Cover([block, *(each for _, each in copies)])
            for at, each in copies:
                if at < before:
                    cover.add(each)
            if bool(cover.view(block).any()):
                self.refuse(constant.target, "it is filled with a constant after it was loaded")
                continue
            for at, each in copies:
                if at >= before:
                    cover.add(each)
            if not bool(cover.view(block).all()):
                remaining.append(constant)
        return remaining


def strided_runs(targets: torch.Tensor, sources: torch.Tensor) -> list[tuple[int, int, Dimensions]] | None:
    """Cover pairs of positions with strided blocks.

    The commonest step becomes a dimension, then the commonest step between blocks of one shape, and so on until nothing repeats.

    Args:
        targets: Ascending positions, int64 of shape ``[n]``.
        sources: The source position of each target position, int64 of shape ``[n]``.

    Returns:
        Source offset, target offset and dimensions of each block; None if there would be more than `_MOST_COPIES`.
    """
    pending: dict[tuple[tuple[int, int, int], ...], list[tuple[torch.Tensor, torch.Tensor]]] = {
        (): [(targets, sources)]
    }
    changed = True
    while changed:
        changed = False
        found: dict[tuple[tuple[int, int, int], ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for dimensions, parts in pending.items():
            target = torch.cat([part for part, _ in parts])
            source = torch.cat([part for _, part in parts])
            order = target.argsort()
            for dimension, *starts in _repeated_steps(target[order], source[order], _reach(dimensions)):
                grown = dimensions if dimension is None else (dimension, *dimensions)
                changed |= dimension is not None
                found.setdefault(grown, []).append((starts[0], starts[1]))
        pending = found
        if sum(len(target) for parts in pending.values() for target, _ in parts) > _MOST_COPIES and not changed:
            return None
    return [
        (start, offset, list(dimensions))
        for dimensions, parts in pending.items()
        for target, source in parts
        for start, offset in zip(source.tolist(), target.tolist(), strict=True)
    ]


def _reach(dimensions: Sequence[tuple[int, int, int]]) -> int:
    """Distance from a block's first source element to its last."""
    return sum((length - 1) * step for length, step, _ in dimensions)


def _repeated_steps(
    target: torch.Tensor, source: torch.Tensor, reach: int
) -> list[tuple[tuple[int, int, int] | None, torch.Tensor, torch.Tensor]]:
    """One more dimension: length and steps of the runs of each length, and the positions at which these runs start.

    Steps are larger than `reach`: the source strides of a block are a mixed radix, and as_strided cannot step backwards.
    """
    if len(target) == 1:
        return [(None, target, source)]
    target_steps, source_steps = target.diff(), source.diff()
    forward = source_steps > reach
    pairs = torch.stack([target_steps, source_steps])[:, :_SAMPLE][:, forward[:_SAMPLE]]
    if pairs.shape[1] == 0:
        return [(None, target, source)]
    distinct, counts = pairs.unique(dim=1, return_counts=True)  # type: ignore[no-untyped-call]
    stride, step = distinct[:, counts.argmax()].tolist()
    same = (target_steps == stride) & (source_steps == step)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), (~same).nonzero().flatten() + 1])
    lengths = torch.cat([starts, torch.tensor([len(target)])]).diff()
    runs: list[tuple[tuple[int, int, int] | None, torch.Tensor, torch.Tensor]] = []
    for length in lengths.unique().tolist():  # type: ignore[no-untyped-call]
        at = starts[lengths == length]
        runs.append((None if length == 1 else (length, step, stride), target[at], source[at]))
    return runs
