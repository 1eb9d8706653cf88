"""The transfer plan: who sends which slices to whom."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from weightlane.ckpt_engines import ManifestError

from ..version.box import Box, Labels, merge, overlay
from ..version.placement import Placement
from ..version.tensor_spec import TensorSpec
from .receiver_groups import check_replicas, check_spec, group_receivers, missing_tensor
from .send_assignment import PART, some, where


@dataclass(frozen=True, slots=True)
class Cell:
    """A slice of a tensor that travels in one piece."""

    tensor: int
    """Which one: its place in the plan's `specs`."""
    box: Box


@dataclass(frozen=True, slots=True)
class Lane:
    """A stream from one trainer rank to the rollout ranks that get exactly these bytes."""

    sender: str
    receivers: tuple[str, ...]
    """In rank order."""
    cells: tuple[Cell, ...]
    """By tensor, and then by first indices."""

    def nbytes(self, specs: Sequence[TensorSpec]) -> int:
        """Bytes of one copy of the stream; `specs` are the plan's."""
        return sum(cell.box.numel * specs[cell.tensor].dtype.itemsize for cell in self.cells)


@dataclass(frozen=True)
class TransferPlan:
    """Who sends which slices to whom.

    Attributes:
        specs: All tensors that are sent, as they are on the wire.
        lanes: By sender in rank order; a sender's own in the order in which it begins them.
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
            cells = [(cell.tensor, cell.box.starts, cell.box.shape) for cell in lane.cells]
            found.update(repr((lane.sender, lane.receivers, cells)).encode())
        return found.hexdigest()[:16]

    @cached_property
    def lane_bytes(self) -> tuple[int, ...]:
        """Bytes of one copy of each of `lanes`."""
        return tuple(lane.nbytes(self.specs) for lane in self.lanes)

    def to_plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "digest": self.digest,
            "tensors": [spec.to_plain() for spec in self.specs],
            "lanes": [
                {
                    "sender": lane.sender,
                    "receivers": list(lane.receivers),
                    "cells": [[cell.tensor, *cell.box.to_plain()] for cell in lane.cells],
                }
                for lane in self.lanes
            ],
        }


def plan_transfer(
    shares: Mapping[str, Placement],
    needed: Mapping[str, Placement],
    *,
    cut: Literal["exact", "shares"] = "exact",
    replicas: Mapping[str, str] | None = None,
    unused: Collection[str] = (),
) -> TransferPlan:
    """Plan how every receiver gets what it needs. The same arguments in the same order give the same plan in every process.

    Args:
        shares: What each trainer rank sends, by `weightlane.sync.plan.send_assignment`; every element at most once.
        needed: What each rollout rank needs. A tensor without slices says that the rank knows it and needs nothing of it.
        cut: What a lane carries. ``"exact"``: what its receivers need of the sender's share and nothing else, so that every
            element that a receiver needs crosses the wire to it once. ``"shares"``: the whole of the sender's share, to everybody
            who needs any of it, for engines whose receivers look at the sender's memory.
        replicas: The replica of each receiver; by default what stands before the last ``/`` of its name.
        unused: Names of tensors that a replica may do without.

    Raises:
        ManifestError: Before anything is sent: a receiver needs a tensor, or elements, that nobody sends; another shape; a dtype
            that cannot hold what is sent; or a replica needs nothing of a tensor.

    >>> import torch
    >>> w = TensorSpec("w", (4, 8), torch.float32)
    >>> rows = Placement.of([(w, Box((0, 0), (2, 8)))])
    >>> needed = {"rollout-0/0": rows, "rollout-1/0": Placement.whole([w])}
    >>> for lane in plan_transfer({"trainer-0": Placement.whole([w])}, needed).lanes:
    ...     print(lane.receivers, [cell.box for cell in lane.cells])
    ('rollout-0/0', 'rollout-1/0') [Box(starts=(0, 0), shape=(2, 8))]
    ('rollout-1/0',) [Box(starts=(2, 0), shape=(2, 8))]
    """
    return _Planner(shares, needed).plan(cut, replicas, frozenset(unused))


@dataclass(slots=True)
class _Sent:
    spec: TensorSpec
    first: int
    """The sender that names it first."""
    boxes: list[tuple[Box, int]]
    """With the numbers of their senders."""


class _Planner:
    def __init__(self, shares: Mapping[str, Placement], needed: Mapping[str, Placement]) -> None:
        self._shares = shares
        self._senders = tuple(shares)
        self._receivers = tuple(needed)
        self._groups = group_receivers(needed)
        self._sent: dict[str, _Sent] = {}
        for sender, placement in enumerate(shares.values()):
            for spec, boxes in zip(placement.specs, placement.boxes, strict=True):
                sent = self._sent.setdefault(spec.name, _Sent(spec, sender, []))
                if sent.spec is not spec:
                    check_spec(sent.spec, self._senders[sent.first], spec, self._senders[sender], exact=True)
                sent.boxes += [(box, sender) for box in boxes]
        self._specs = tuple(sent.spec for sent in self._sent.values())
        # Layers are alike: what was found for one tensor is right for all that are cut alike.
        self._alike: dict[object, list[tuple[int, Labels, Box]]] = {}

    def plan(
        self, cut: Literal["exact", "shares"], replicas: Mapping[str, str] | None, unused: frozenset[str]
    ) -> TransferPlan:
        needs = self._needs()
        check_replicas(
            self._groups, {sent.spec.name: self._senders[sent.first] for sent in self._sent.values()}, replicas, unused
        )
        lanes: dict[tuple[int, Labels], list[Cell]] = {}
        for index, (sent, need) in enumerate(zip(self._sent.values(), needs, strict=True)):
            if need:
                key = (sent.spec.shape, tuple(sent.boxes), tuple(need))
                if (cells := self._alike.get(key)) is None:
                    cells = self._alike[key] = list(self._cells(sent, need))
                for sender, groups, box in cells:
                    lanes.setdefault((sender, groups), []).append(Cell(index, box))
        if cut == "shares":
            lanes = self._whole_shares(lanes)
        return TransferPlan(self._specs, tuple(self._in_turn(lanes)))

    def _needs(self) -> list[list[tuple[Box, int]]]:
        """Of each tensor, the slices that are needed, with the numbers of the groups."""
        place = {name: index for index, name in enumerate(self._sent)}
        needs: list[list[tuple[Box, int]]] = [[] for _ in place]
        for number, group in enumerate(self._groups):
            for spec, boxes in zip(group.placement.specs, group.placement.boxes, strict=True):
                sent = self._sent.get(spec.name)
                if sent is None:
                    raise missing_tensor(spec, group.receivers[0])
                if sent.spec is not spec:
                    check_spec(sent.spec, self._senders[sent.first], spec, group.receivers[0], exact=False)
                needs[place[spec.name]] += [(box, number) for box in boxes]
        return needs

    def _cells(self, sent: _Sent, need: list[tuple[Box, int]]) -> Iterator[tuple[int, Labels, Box]]:
        """What travels of a tensor: sender, groups and slice."""
        shape = sent.spec.shape
        for box, group in need:
            if not box.fits(shape):
                raise self._nobody_sends(sent.spec, box, group)
        if len(sent.boxes) == 1 and sent.boxes[0][0].shape == shape:  # one sender has all of it
            sender = sent.boxes[0][1]
            for box, groups in overlay(need, shape):
                if groups:
                    yield sender, groups, box
            return
        parts: dict[tuple[int, Labels], list[Box]] = {}
        for box, groups, senders in self._laid_over(sent, need):
            if groups:
                parts.setdefault((self._only(senders, sent.spec, box, groups[0]), groups), []).append(box)
        for (sender, groups), boxes in parts.items():
            for box in merge(boxes) if len(boxes) > 1 else boxes:
                yield sender, groups, box

    def _laid_over(self, sent: _Sent, need: list[tuple[Box, int]]) -> Iterator[tuple[Box, Labels, Labels]]:
        """Cells of a tensor, the groups that need each, and who sends it."""
        count = len(self._groups)
        shares = ((box, count + sender) for box, sender in sent.boxes)
        for box, labels in overlay([*need, *shares], sent.spec.shape):
            groups = tuple(label for label in labels if label < count)
            yield box, groups, tuple(label - count for label in labels[len(groups) :])

    def _only(self, senders: Labels, spec: TensorSpec, box: Box, group: int) -> int:
        if not senders:
            raise self._nobody_sends(spec, box, group)
        if len(senders) > 1:
            raise ManifestError(
                f"{where(box)} of {spec.name} is in the shares of {some([self._senders[sender] for sender in senders])}.",
                part=PART,
                peer=self._senders[senders[1]],
                hint="Plan with what `shares` returns: there every element has one sender.",
            )
        return senders[0]

    def _nobody_sends(self, spec: TensorSpec, box: Box, group: int) -> ManifestError:
        receiver = self._groups[group].receivers[0]
        return ManifestError(
            f"{receiver} needs {where(box)} of {spec.name} of shape {list(spec.shape)}, which no trainer rank sends.",
            part=PART,
            peer=receiver,
            hint="Together the trainer ranks must hold every element, and rollout ranks may ask for nothing beyond the shape.",
        )

    def _whole_shares(self, lanes: Mapping[tuple[int, Labels], list[Cell]]) -> dict[tuple[int, Labels], list[Cell]]:
        groups: dict[int, set[int]] = {}
        for sender, wanted in lanes:
            groups.setdefault(sender, set()).update(wanted)
        place = {name: index for index, name in enumerate(self._sent)}
        whole = {}
        for sender, placement in enumerate(self._shares.values()):
            if sender in groups:
                slices = zip(placement.specs, placement.boxes, strict=True)
                cells = [Cell(place[spec.name], box) for spec, boxes in slices for box in boxes]
                cells.sort(key=lambda cell: (cell.tensor, cell.box.starts))
                whole[sender, tuple(sorted(groups[sender]))] = cells
        return whole

    def _in_turn(self, lanes: Mapping[tuple[int, Labels], list[Cell]]) -> Iterator[Lane]:
        """The lanes of one sender after the other's, each sender beginning with other receivers than the one before."""
        place = {receiver: index for index, receiver in enumerate(self._receivers)}
        whom: dict[Labels, tuple[int, ...]] = {}
        own: dict[int, list[tuple[tuple[int, ...], list[Cell]]]] = {}
        for (sender, groups), cells in lanes.items():
            if groups not in whom:
                whom[groups] = tuple(
                    sorted(place[name] for number in groups for name in self._groups[number].receivers)
                )
            own.setdefault(sender, []).append((whom[groups], cells))
        for sender in sorted(own):
            # Lanes to few receivers carry most, and are about equally long: each sender's turn among them is another.
            alike: dict[int, list[tuple[tuple[int, ...], list[Cell]]]] = {}
            for lane in sorted(own[sender], key=lambda lane: lane[0]):
                alike.setdefault(len(lane[0]), []).append(lane)
            for count in sorted(alike):
                turn = sender % len(alike[count])
                for receivers, cells in alike[count][turn:] + alike[count][:turn]:
                    yield Lane(self._senders[sender], tuple(self._receivers[each] for each in receivers), tuple(cells))
