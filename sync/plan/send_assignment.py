"""The assignment of slices to senders: every element is sent by one of the trainer ranks that hold it.

Elements that several ranks hold are assigned so that all ranks send about as many bytes.
First the bytes of each set of holders are divided among the holders as if they could be split anywhere. The quotas minimise the
sum of the squares of all loads, and with it the largest load (Fujishige, "Lexicographically Optimal Base of a Polymatroid",
1980). They are found by rounds that assign the bytes of one set after the other to its least loaded ranks. The rounds converge,
because this is block coordinate descent on a convex function (Tseng, "Convergence of a Block Coordinate Descent Method for
Nondifferentiable Minimization", 2001). Then real slices fill the quotas, the largest slice into the largest quota. A slice that
would overflow a quota is cut.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weightlane.ckpt_engines import ManifestError

from ..version.box import Box, Labels, merge, overlay
from ..version.expectation import some
from ..version.placement import Placement
from ..version.tensor_spec import TensorSlice, TensorSpec, dtype_name

_ROUNDS = 40
"""Limit for the rounds over all sets of holders, in case the quotas do not converge before. Nested sets need one round."""
_STILL = 0.002
"""Tolerance of convergence, as a share of the mean load: the rounds end when no quota changes by more."""
_OVERFLOW = 0.03
"""Share of the mean load by which a slice may overflow a quota without being cut, because every cut adds a slice."""


def balance(shared: Mapping[Labels, Sequence[TensorSlice]], load: Sequence[int]) -> Iterator[tuple[int, TensorSlice]]:
    """Assign every slice, or each of the rows that it is cut into, to one of its holders.

    Args:
        shared: Slices by the ranks that hold them.
        load: Bytes that each rank sends in any case.

    Yields:
        A rank and a slice that it sends.
    """
    if not shared:
        return
    sizes = [sum(each.nbytes for each in slices) for slices in shared.values()]
    mean = (sum(load) + sum(sizes)) / len(load)
    quotas = _quotas(list(shared), sizes, load, _STILL * mean)
    for (holders, slices), quota in zip(shared.items(), quotas, strict=True):
        yield from _fill(holders, slices, quota, _OVERFLOW * mean)


def _quotas(groups: Sequence[Labels], sizes: Sequence[int], load: Sequence[int], still: float) -> list[list[float]]:
    """For each group of holders, the bytes of the group that each holder sends; `sizes` are the bytes of each group."""
    loads = [float(nbytes) for nbytes in load]
    quotas = [[0.0] * len(holders) for holders in groups]
    # Small groups first: if groups are nested, one round is enough.
    order = sorted(range(len(groups)), key=lambda group: (len(groups[group]), groups[group]))
    for _ in range(_ROUNDS):
        moved = 0.0
        for group in order:
            holders, before = groups[group], quotas[group]
            others = [loads[rank] - quota for rank, quota in zip(holders, before, strict=True)]
            quotas[group] = _add_to_least(others, sizes[group])
            for rank, other, old, new in zip(holders, others, before, quotas[group], strict=True):
                moved = max(moved, abs(new - old))
                loads[rank] = other + new
        if moved <= still or len(groups) == 1:
            break
    return quotas


def _add_to_least(loads: Sequence[float], nbytes: float) -> list[float]:
    """Distribute `nbytes` over the smallest of `loads` so that these become equal. Returns the bytes added to each load."""
    below = 0.0
    target = 0.0
    for count, load in enumerate(sorted(loads), start=1):
        if count > 1 and load >= target:
            break
        below += load
        target = (nbytes + below) / count
    return [max(0.0, target - load) for load in loads]


def _fill(
    holders: Labels, slices: Sequence[TensorSlice], quota: Sequence[float], overflow: float
) -> Iterator[tuple[int, TensorSlice]]:
    """Fill quotas with slices, the largest slice into the quota with the most room."""
    waiting = [_entry(each) for each in slices]
    room = [(-left, rank) for rank, left in zip(holders, quota, strict=True)]
    heapq.heapify(waiting)
    heapq.heapify(room)
    while waiting:
        each = heapq.heappop(waiting)[-1]
        left, rank = -room[0][0], room[0][1]
        if each.nbytes > left + overflow and (cut := _cut(each, left)):
            each, rest = cut
            heapq.heappush(waiting, _entry(rest))
            if each.nbytes > left + overflow:  # one row is still too large: it is cut along its columns when it is next
                heapq.heappush(waiting, _entry(each))
                continue
        heapq.heapreplace(room, (each.nbytes - left, rank))
        yield rank, each


def _entry(each: TensorSlice) -> tuple[int, str, tuple[int, ...], TensorSlice]:
    """The slice as an entry of a heap that pops the largest slice first."""
    return -each.nbytes, each.spec.name, each.box.starts, each


def _cut(each: TensorSlice, nbytes: float) -> tuple[TensorSlice, TensorSlice] | None:
    """Cut a slice in two along its first axis of size > 1, the first part of about `nbytes` bytes; None for one element."""
    box = each.box
    axis = next((axis for axis, size in enumerate(box.shape) if size > 1), None)
    if axis is None:
        return None
    start, whole = box.starts[axis], box.shape[axis]
    size = min(max(round(nbytes / (each.nbytes // whole)), 1), whole - 1)
    first, second = box.with_axis(axis, start, size), box.with_axis(axis, start + size, whole - size)
    return TensorSlice(each.spec, first), TensorSlice(each.spec, second)


PART = "transfer plan"


@dataclass(slots=True)
class HeldTensor:
    """A tensor with the slices that trainer ranks hold, or send."""

    spec: TensorSpec
    first: int
    """Index of the first rank that lists the tensor."""
    boxes: list[tuple[Box, int]] = field(default_factory=list)
    """Slices, each with the index of the rank that holds it."""
    listed: int = 0
    """Number of ranks that list the tensor."""


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
            tensor.listed += 1
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
        """Combine the placements of all trainer ranks. The order of `held` is the rank order.

        Raises:
            ManifestError: Ranks disagree about a tensor, or no rank holds some of its elements.
        """
        ranks = tuple(held)
        # A rank that holds nothing of two tied tensors cannot know that: it lists both, and the ranks that hold them only one.
        tensors = {
            name: tensor
            for name, tensor in combined(held).items()
            if tensor.boxes or not tensor.spec.numel or tensor.listed == len(ranks)
        }
        # Layers are alike: tensors with the same shape and the same slices share their cells.
        known: dict[object, _Cells] = {}
        return cls(
            ranks,
            tuple(tensor.spec for tensor in tensors.values()),
            tuple(_cells(tensor, ranks, known) for tensor in tensors.values()),
            tuple(tensor.first for tensor in tensors.values()),
        )

    def replicated(self) -> tuple[TensorSlice, ...]:
        """The slices that more than one rank holds, with equal values."""
        return tuple(
            TensorSlice(spec, box)
            for spec, cells in zip(self.specs, self.cells, strict=True)
            for box, holders in cells
            if len(holders) > 1
        )

    def assign(self) -> dict[str, Placement]:
        """Assign every element to one rank, which sends it to all its receivers. Returns the share of each rank, by name.

        Elements that several ranks hold are assigned so that the ranks send about as many bytes each; large slices may be cut
        into rows for that. The same placements in the same order give the same result in every process.

        >>> import torch
        >>> whole = Placement.whole([TensorSpec("norm", (4,), torch.float32)])
        >>> shares = HolderMap.of({"trainer-0": whole, "trainer-1": whole}).assign()
        >>> [boxes for placement in shares.values() for boxes in placement.boxes]
        [(Box(starts=(0,), shape=(2,)),), (Box(starts=(2,), shape=(2,)),)]
        """
        sent: list[dict[str, list[Box]]] = [{} for _ in self.ranks]
        load = [0] * len(self.ranks)
        shared: dict[Labels, list[TensorSlice]] = {}
        for spec, cells, first in zip(self.specs, self.cells, self._named_by, strict=True):
            for box, holders in cells:
                each = TensorSlice(spec, box)
                if len(holders) == 1:
                    sent[holders[0]].setdefault(spec.name, []).append(box)
                    load[holders[0]] += each.nbytes
                else:
                    shared.setdefault(holders, []).append(each)
            if not cells:  # one rank has to list an empty tensor
                sent[first][spec.name] = []
        for rank, each in balance(shared, load):
            sent[rank].setdefault(each.spec.name, []).append(each.box)
        number = {spec.name: index for index, spec in enumerate(self.specs)}

        def placement(boxes: Mapping[str, list[Box]]) -> Placement:
            order = sorted(boxes, key=number.__getitem__)
            return Placement.of_boxes((self.specs[number[name]], merge(boxes[name])) for name in order)

        return {rank: placement(boxes) for rank, boxes in zip(self.ranks, sent, strict=True)}


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
