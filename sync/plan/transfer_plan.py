"""The transfer plan: which trainer rank sends which slices to which rollout ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..version.box import Box, Labels, merge, overlay
from ..version.placement import Placement
from ..version.tensor_spec import TensorSlice, TensorSpec
from .send_assignment import HeldTensor, combined


@dataclass(frozen=True)
class Lane:
    """Everything that one sender sends to one set of receivers."""

    sender: str
    receivers: tuple[str, ...]
    """In rank order."""
    cells: tuple[TensorSlice, ...]
    """The slices, sorted by tensor in the order of the plan's `specs`, then by first indices."""

    @cached_property
    def nbytes(self) -> int:
        """Bytes for one receiver."""
        return sum(cell.nbytes for cell in self.cells)


@dataclass(frozen=True)
class TransferPlan:
    """The lanes from all senders.

    Attributes:
        specs: All tensors that are sent, as on the wire.
        lanes: Lanes by sender in rank order; the lanes of one sender in the order in which it sends them.
    """

    specs: tuple[TensorSpec, ...]
    lanes: tuple[Lane, ...]

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits, equal for equal plans."""
        found = hashlib.sha256()
        for spec in self.specs:
            found.update(repr(spec.to_plain()).encode())
        for lane in self.lanes:
            cells = [(cell.spec.name, cell.box.starts, cell.box.shape) for cell in lane.cells]
            found.update(repr((lane.sender, lane.receivers, cells)).encode())
        return found.hexdigest()[:16]


def plan_transfer(
    shares: Mapping[str, Placement],
    needed: Mapping[str, Placement],
    *,
    cut: Literal["exact", "shares"] = "exact",
) -> TransferPlan:
    """Plan which sender sends which slices to which receivers. Equal arguments give an equal plan in every process.

    Args:
        shares: The slices that each trainer rank sends, from `HolderMap.assign`: every element once.
        needed: The slices that each rollout rank needs, from `Supply.on_the_wire`.
        cut: The content of a lane. ``"exact"``: the slices of the sender's share that its receivers need, so that a receiver gets
            every element that it needs once, and no other element. ``"shares"``: the sender's full share, for every receiver
            that needs a part of it, with engines whose receivers read the sender's memory.

    >>> import torch
    >>> w = TensorSpec("w", (4, 8), torch.float32)
    >>> rows = Placement.of([(w, Box((0, 0), (2, 8)))])
    >>> needed = {"rollout-0/0": rows, "rollout-1/0": Placement.whole([w])}
    >>> for lane in plan_transfer({"trainer-0": Placement.whole([w])}, needed).lanes:
    ...     print(lane.receivers, [cell.box for cell in lane.cells])
    ('rollout-1/0',) [Box(starts=(2, 0), shape=(2, 8))]
    ('rollout-0/0', 'rollout-1/0') [Box(starts=(0, 0), shape=(2, 8))]
    """
    return _Planner(shares, needed).plan(cut)


class _Planner:
    def __init__(self, shares: Mapping[str, Placement], needed: Mapping[str, Placement]) -> None:
        self._shares = shares
        self._senders = tuple(shares)
        self._receivers = tuple(needed)
        self._groups = group_receivers(needed)
        self._sent = combined(shares)
        # Layers are alike: tensors with the same shape and the same slices share their cells.
        self._known: dict[object, list[tuple[int, Labels, Box]]] = {}

    def plan(self, cut: Literal["exact", "shares"]) -> TransferPlan:
        lanes: dict[tuple[int, Labels], list[TensorSlice]] = {}
        for sent, need in zip(self._sent.values(), self._needs(), strict=True):
            if need:
                key = (sent.spec.shape, tuple(sent.boxes), tuple(need))
                if (cells := self._known.get(key)) is None:
                    cells = self._known[key] = list(self._cells(sent, need))
                for sender, groups, box in cells:
                    lanes.setdefault((sender, groups), []).append(TensorSlice(sent.spec, box))
        if cut == "shares":
            lanes = self._whole_shares(lanes)
        return TransferPlan(tuple(sent.spec for sent in self._sent.values()), tuple(self._ordered(lanes)))

    def _needs(self) -> list[list[tuple[Box, int]]]:
        """For each tensor, the slices that are needed, with the index of the receiver group."""
        index_of = {name: index for index, name in enumerate(self._sent)}
        needs: list[list[tuple[Box, int]]] = [[] for _ in index_of]
        for number, (placement, _) in enumerate(self._groups):
            for spec, boxes in zip(placement.specs, placement.boxes, strict=True):
                needs[index_of[spec.name]] += [(box, number) for box in boxes]
        return needs

    def _cells(self, sent: HeldTensor, need: list[tuple[Box, int]]) -> Iterator[tuple[int, Labels, Box]]:
        """The cells of a tensor: sender, receiver groups, and slice."""
        shape = sent.spec.shape
        if len(sent.boxes) == 1 and sent.boxes[0][0].shape == shape:  # one sender has all of it
            sender = sent.boxes[0][1]
            for box, groups in overlay(need, shape):
                if groups:
                    yield sender, groups, box
            return
        parts: dict[tuple[int, Labels], list[Box]] = {}
        for box, groups, (sender,) in self._overlaid(sent, need):
            if groups:
                parts.setdefault((sender, groups), []).append(box)
        for (sender, groups), boxes in parts.items():
            for box in merge(boxes) if len(boxes) > 1 else boxes:
                yield sender, groups, box

    def _overlaid(self, sent: HeldTensor, need: list[tuple[Box, int]]) -> Iterator[tuple[Box, Labels, Labels]]:
        """Cells of a tensor, the groups that need each, and the senders that send it."""
        count = len(self._groups)
        shares = ((box, count + sender) for box, sender in sent.boxes)
        for box, labels in overlay([*need, *shares], sent.spec.shape):
            groups = tuple(label for label in labels if label < count)
            yield box, groups, tuple(label - count for label in labels[len(groups) :])

    def _whole_shares(
        self, lanes: Mapping[tuple[int, Labels], list[TensorSlice]]
    ) -> dict[tuple[int, Labels], list[TensorSlice]]:
        """One lane for each sender with everything that it sends."""
        groups: dict[int, set[int]] = {}
        for sender, wanted in lanes:
            groups.setdefault(sender, set()).update(wanted)
        index_of = {name: index for index, name in enumerate(self._sent)}
        whole = {}
        for sender, placement in enumerate(self._shares.values()):
            if sender in groups:
                cells = [TensorSlice(spec, box) for spec, box in placement.slices]
                cells.sort(key=lambda cell: (index_of[cell.spec.name], cell.box.starts))
                whole[sender, tuple(sorted(groups[sender]))] = cells
        return whole

    def _ordered(self, lanes: Mapping[tuple[int, Labels], list[TensorSlice]]) -> Iterator[Lane]:
        """The lanes, sender by sender. Each sender begins with other receivers than the previous sender, to spread the load."""
        index_of = {receiver: index for index, receiver in enumerate(self._receivers)}
        receivers_of: dict[Labels, tuple[int, ...]] = {}
        own: dict[int, list[tuple[tuple[int, ...], list[TensorSlice]]]] = {}
        for (sender, groups), cells in lanes.items():
            if groups not in receivers_of:
                receivers_of[groups] = tuple(
                    sorted(index_of[name] for number in groups for name in self._groups[number][1])
                )
            own.setdefault(sender, []).append((receivers_of[groups], cells))
        for sender in sorted(own):
            # Lanes with equally many receivers have about as many bytes, and lanes with few receivers have the most.
            by_count: dict[int, list[tuple[tuple[int, ...], list[TensorSlice]]]] = {}
            for lane in sorted(own[sender], key=lambda lane: lane[0]):
                by_count.setdefault(len(lane[0]), []).append(lane)
            for count in sorted(by_count):
                turn = sender % len(by_count[count])
                for receivers, cells in by_count[count][turn:] + by_count[count][:turn]:
                    yield Lane(self._senders[sender], tuple(self._receivers[each] for each in receivers), tuple(cells))


def group_receivers(needed: Mapping[str, Placement]) -> list[tuple[Placement, list[str]]]:
    """Group the rollout ranks with equal placements, in the order of each group's first rank, the ranks in their order.

    Placements are compared instead of hashed, because two different ones differ within the first few tensors. A placement object
    that many ranks share is compared once.
    """
    groups: list[tuple[Placement, list[str]]] = []
    known: dict[int, list[str]] = {}
    for receiver, placement in needed.items():
        if (receivers := known.get(id(placement))) is None:
            receivers = next((each for other, each in groups if other == placement), None)
            if receivers is None:
                receivers = []
                groups.append((placement, receivers))
            known[id(placement)] = receivers
        receivers.append(receiver)
    return groups
