"""Which trainer rank sends what: every element once, whoever receives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weightlane.ckpt_engines import ManifestError

from ..version.box import Box, Labels, merge, overlay
from ..version.placement import Placement
from ..version.tensor_spec import TensorSpec, dtype_name
from .load_balance import SharedSlice, balance

PART = "transfer plan"
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Replicated:
    """Elements that several trainer ranks hold, and that must be equal there."""

    spec: TensorSpec
    box: Box
    holders: tuple[str, ...]
    """In rank order."""


@dataclass(slots=True)
class _Tensor:
    spec: TensorSpec
    first: int
    """The rank that named it first."""
    held: list[tuple[int, tuple[Box, ...]]] = field(default_factory=list)


_Cells = tuple[tuple[Box, Labels], ...]
_Alike = dict[object, _Cells]
"""Layers are alike: cells by shape and boxes with their ranks."""


@dataclass(frozen=True)
class Holdings:
    """What trainer ranks hold between them, cut into cells that are each held by the same ranks throughout.

    Attributes:
        ranks: Their names, in rank order.
        specs: Every tensor, in the order in which ranks name them.
        cells: Of each tensor, its cells in the order of their first indices, with the numbers of the ranks that hold them.
    """

    ranks: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    cells: tuple[_Cells, ...]
    _named_by: tuple[int, ...]

    @classmethod
    def of(cls, held: Mapping[str, Placement]) -> Holdings:
        """Lay the ranks' placements over one another.

        Args:
            held: What each rank holds; rank order is the order of the mapping.

        Raises:
            ManifestError: Ranks disagree about a tensor, or have elements of it that none of them holds.
        """
        ranks = tuple(held)
        tensors: dict[str, _Tensor] = {}
        for rank, placement in enumerate(held.values()):
            for spec, boxes in zip(placement.specs, placement.boxes, strict=True):
                tensor = tensors.get(spec.name)
                if tensor is None:
                    tensor = tensors[spec.name] = _Tensor(spec, rank)
                elif tensor.spec is not spec and tensor.spec != spec:
                    raise _disagreement(tensor.spec, ranks[tensor.first], spec, ranks[rank])
                if boxes:
                    tensor.held.append((rank, boxes))
        alike: _Alike = {}
        return cls(
            ranks,
            tuple(tensor.spec for tensor in tensors.values()),
            tuple(_cells(tensor, ranks, alike) for tensor in tensors.values()),
            tuple(tensor.first for tensor in tensors.values()),
        )

    def replicated(self) -> tuple[Replicated, ...]:
        """What more than one rank holds."""
        return tuple(
            Replicated(spec, box, tuple(self.ranks[holder] for holder in holders))
            for spec, cells in zip(self.specs, self.cells, strict=True)
            for box, holders in cells
            if len(holders) > 1
        )

    def shares(self) -> dict[str, Placement]:
        """What each rank sends, in the order of `specs`; see `shares`."""
        sent: list[dict[int, list[Box]]] = [{} for _ in self.ranks]
        load = [0] * len(self.ranks)
        free: dict[Labels, list[SharedSlice]] = {}
        for index, (spec, cells, first) in enumerate(zip(self.specs, self.cells, self._named_by, strict=True)):
            for box, holders in cells:
                if len(holders) == 1:
                    sent[holders[0]].setdefault(index, []).append(box)
                    load[holders[0]] += box.numel * spec.dtype.itemsize
                else:
                    free.setdefault(holders, []).append(SharedSlice(index, box, spec.dtype.itemsize))
            if not cells:  # an empty tensor: somebody says that it exists
                sent[first][index] = []
        for rank, piece in balance(free, load):
            sent[rank].setdefault(piece.tensor, []).append(piece.box)
        return {rank: self._placement(boxes) for rank, boxes in zip(self.ranks, sent, strict=True)}

    def _placement(self, boxes: dict[int, list[Box]]) -> Placement:
        order = sorted(boxes)
        return Placement(
            tuple(self.specs[index] for index in order),
            tuple(tuple(merge(boxes[index]) if len(boxes[index]) > 1 else boxes[index]) for index in order),
        )


def shares(held: Mapping[str, Placement]) -> dict[str, Placement]:
    """What each trainer rank sends: every element of every tensor once, whoever receives it.

    Elements that several ranks hold are dealt out so that the ranks send about as many bytes each; large pieces may be cut into
    rows for that. The same `held` in the same order gives the same result in every process.

    Args:
        held: What each rank holds; rank order is the order of the mapping.

    Raises:
        ManifestError: Ranks disagree about a tensor's shape or dtype, or have elements of it that none of them holds.

    >>> import torch
    >>> spec = TensorSpec("norm", (4,), torch.float32)
    >>> sent = shares({"trainer-0": Placement.whole([spec]), "trainer-1": Placement.whole([spec])})
    >>> [boxes for placement in sent.values() for boxes in placement.boxes]
    [(Box(starts=(0,), shape=(2,)),), (Box(starts=(2,), shape=(2,)),)]
    """
    return Holdings.of(held).shares()


def _cells(tensor: _Tensor, ranks: Sequence[str], alike: _Alike) -> _Cells:
    spec = tensor.spec
    boxes = tuple((box, rank) for rank, held in tensor.held for box in held)
    if (found := alike.get((spec.shape, boxes))) is not None:
        return found
    for box, rank in boxes:
        if not box.fits(spec.shape):
            raise ManifestError(
                f"{spec.name} of shape {list(spec.shape)} has no slice {where(box)}, which {ranks[rank]} holds.",
                part=PART,
                peer=ranks[rank],
                hint="Every rank must describe its slices in the indices of the full tensor.",
            )
    cells = overlay(boxes, spec.shape)
    for box, holders in cells:
        if not holders:
            have = some([ranks[rank] for rank in dict.fromkeys(rank for rank, _ in tensor.held)])
            others = (
                f"{have} hold the rest" if tensor.held else f"{ranks[tensor.first]} names it and holds nothing of it"
            )
            raise ManifestError(
                f"no rank holds {where(box)} of {spec.name} of shape {list(spec.shape)}; {others}.",
                part=PART,
                peer=ranks[tensor.first],
                hint="Together the trainer ranks must hold every element of every tensor that they name.",
            )
    found = alike[spec.shape, boxes] = tuple(cells)
    return found


def _disagreement(one: TensorSpec, rank: str, other: TensorSpec, another: str) -> ManifestError:
    if one.shape != other.shape:
        told = f"has shape {list(one.shape)} on {rank} and {list(other.shape)} on {another}"
    else:
        told = f"is {dtype_name(one.dtype)} on {rank} and {dtype_name(other.dtype)} on {another}"
    return ManifestError(
        f"{one.name} {told}.",
        part=PART,
        peer=another,
        hint="All trainer ranks must name a tensor by its full Hugging Face shape and one wire dtype.",
    )


def where(box: Box) -> str:
    """A box as one would index it: ``[0:4, 8:16]``."""
    ranges = (f"{first}:{last}" for first, last in zip(box.starts, box.stops, strict=True))
    return f"[{', '.join(ranges)}]" if box.starts else "the one element"


def some(names: Sequence[str]) -> str:
    """The first of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
