"""The assignment of slices to senders: every element is sent by one of the trainer ranks that hold it."""

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
"""Limit for the names that an error lists."""


@dataclass(frozen=True, slots=True)
class ReplicatedSlice:
    """Elements that several trainer ranks hold, with equal values."""

    spec: TensorSpec
    box: Box
    holders: tuple[str, ...]
    """In rank order."""


@dataclass(slots=True)
class HeldTensor:
    """A tensor with the slices that trainer ranks hold, or send."""

    spec: TensorSpec
    first: int
    """Index of the first rank that lists the tensor."""
    boxes: list[tuple[Box, int]] = field(default_factory=list)
    """Slices, each with the index of the rank that holds it."""


def combined(held: Mapping[str, Placement]) -> dict[str, HeldTensor]:
    """Every tensor by name, with the slices of all ranks. Raises `ManifestError` if ranks disagree about shape or dtype."""
    ranks = tuple(held)
    tensors: dict[str, HeldTensor] = {}
    for rank, placement in enumerate(held.values()):
        for spec, boxes in zip(placement.specs, placement.boxes, strict=True):
            tensor = tensors.get(spec.name)
            if tensor is None:
                tensor = tensors[spec.name] = HeldTensor(spec, rank)
            elif tensor.spec is not spec and tensor.spec != spec:
                raise _disagreement(tensor.spec, ranks[tensor.first], spec, ranks[rank])
            tensor.boxes += [(box, rank) for box in boxes]
    return tensors


_Cells = tuple[tuple[Box, Labels], ...]


@dataclass(frozen=True)
class HolderMap:
    """Which trainer ranks hold which elements. Every tensor is cut into cells; all elements of a cell have the same holders.

    Attributes:
        ranks: Names of the trainer ranks, in rank order.
        specs: Every tensor, in the order in which the ranks list them.
        cells: The cells of each tensor, in the order of their first indices, with the indices of their holders.
    """

    ranks: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    cells: tuple[_Cells, ...]
    _named_by: tuple[int, ...]

    @classmethod
    def of(cls, held: Mapping[str, Placement]) -> HolderMap:
        """Combine the placements of all trainer ranks.

        Args:
            held: The placement of each rank. The order of the mapping is the rank order.

        Raises:
            ManifestError: Ranks disagree about a tensor, or no rank holds some of its elements.
        """
        ranks, tensors = tuple(held), combined(held)
        # Layers are alike: tensors with the same shape and the same slices share their cells.
        known: dict[object, _Cells] = {}
        return cls(
            ranks,
            tuple(tensor.spec for tensor in tensors.values()),
            tuple(_cells(tensor, ranks, known) for tensor in tensors.values()),
            tuple(tensor.first for tensor in tensors.values()),
        )

    def replicated(self) -> tuple[ReplicatedSlice, ...]:
        """The slices that more than one rank holds."""
        return tuple(
            ReplicatedSlice(spec, box, tuple(self.ranks[holder] for holder in holders))
            for spec, cells in zip(self.specs, self.cells, strict=True)
            for box, holders in cells
            if len(holders) > 1
        )

    def assign(self) -> dict[str, Placement]:
        """The share of each rank: the slices that it sends, in the order of `specs`. See `assign_slices`."""
        sent: list[dict[int, list[Box]]] = [{} for _ in self.ranks]
        load = [0] * len(self.ranks)
        shared: dict[Labels, list[SharedSlice]] = {}
        for index, (spec, cells, first) in enumerate(zip(self.specs, self.cells, self._named_by, strict=True)):
            for box, holders in cells:
                if len(holders) == 1:
                    sent[holders[0]].setdefault(index, []).append(box)
                    load[holders[0]] += box.numel * spec.dtype.itemsize
                else:
                    shared.setdefault(holders, []).append(SharedSlice(index, box, spec.dtype.itemsize))
            if not cells:  # one rank has to list an empty tensor
                sent[first][index] = []
        for rank, each in balance(shared, load):
            sent[rank].setdefault(each.tensor, []).append(each.box)
        return {rank: self._placement(boxes) for rank, boxes in zip(self.ranks, sent, strict=True)}

    def _placement(self, boxes: dict[int, list[Box]]) -> Placement:
        order = sorted(boxes)
        return Placement(
            tuple(self.specs[index] for index in order),
            tuple(tuple(merge(boxes[index]) if len(boxes[index]) > 1 else boxes[index]) for index in order),
        )


def assign_slices(held: Mapping[str, Placement]) -> dict[str, Placement]:
    """Assign every element of every tensor to one trainer rank, which sends it to all its receivers.

    Elements that several ranks hold are assigned so that the ranks send about as many bytes each; large slices may be cut into
    rows for that. The same `held` in the same order gives the same result in every process.

    Args:
        held: The placement of each rank. The order of the mapping is the rank order.

    Returns:
        The share of each rank, by name.

    Raises:
        ManifestError: Ranks disagree about a tensor's shape or dtype, or no rank holds some of its elements.

    >>> import torch
    >>> spec = TensorSpec("norm", (4,), torch.float32)
    >>> shares = assign_slices({"trainer-0": Placement.whole([spec]), "trainer-1": Placement.whole([spec])})
    >>> [boxes for placement in shares.values() for boxes in placement.boxes]
    [(Box(starts=(0,), shape=(2,)),), (Box(starts=(2,), shape=(2,)),)]
    """
    return HolderMap.of(held).assign()


def _cells(tensor: HeldTensor, ranks: Sequence[str], known: dict[object, _Cells]) -> _Cells:
    spec, key = tensor.spec, (tensor.spec.shape, tuple(tensor.boxes))
    if (found := known.get(key)) is not None:
        return found
    for box, rank in tensor.boxes:
        if not box.fits(spec.shape):
            raise ManifestError(
                f"{spec.name} of shape {list(spec.shape)} has no slice {where(box)}, which {ranks[rank]} holds.",
                part=PART,
                peer=ranks[rank],
                hint="Every rank must describe its slices in the indices of the full tensor.",
            )
    cells = overlay(tensor.boxes, spec.shape)
    for box, holders in cells:
        if not holders:
            have = some([ranks[rank] for rank in dict.fromkeys(rank for _, rank in tensor.boxes)])
            others = f"{have} hold the rest" if have else f"{ranks[tensor.first]} names it and holds nothing of it"
            raise ManifestError(
                f"no rank holds {where(box)} of {spec.name} of shape {list(spec.shape)}; {others}.",
                part=PART,
                peer=ranks[tensor.first],
                hint="Together the trainer ranks must hold every element of every tensor that they name.",
            )
    found = known[key] = tuple(cells)
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
    """Text of a box as an index: ``[0:4, 8:16]``."""
    ranges = (f"{first}:{last}" for first, last in zip(box.starts, box.stops, strict=True))
    return f"[{', '.join(ranges)}]" if box.starts else "the one element"


def some(names: Sequence[str]) -> str:
    """Text with the first `_SHOWN` names and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
