"""A transfer plan delivers every needed element once, from a rank that holds it, whatever the ranks hold and need."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import numpy as np
import pytest
import torch
from drawn import problems
from hypothesis import given

from weightlane.ckpt_engines import ManifestError
from weightlane.sync.plan import HolderMap, TransferPlan, plan_transfer
from weightlane.sync.plan.session_plan import Supply
from weightlane.sync.version.box import Box
from weightlane.sync.version.placement import Placement
from weightlane.sync.version.tensor_spec import TensorSpec

BF16 = torch.bfloat16
Counts = dict[str, np.ndarray]


def counts(specs: Iterable[TensorSpec], slices: Iterable[tuple[str, Box]]) -> Counts:
    """How often each element of each tensor is in one of the slices."""
    found = {spec.name: np.zeros(spec.shape, np.int64) for spec in specs}
    for name, box in slices:
        found[name][box.index] += 1
    return found


def slices_of(placement: Placement) -> Iterable[tuple[str, Box]]:
    return ((spec.name, box) for spec, boxes in zip(placement.specs, placement.boxes, strict=True) for box in boxes)


def arriving(plan: TransferPlan, receiver: str) -> Iterable[tuple[str, Box]]:
    return ((cell.spec.name, cell.box) for lane in plan.lanes if receiver in lane.receivers for cell in lane.cells)


def equal(one: Counts, other: Counts) -> bool:
    return all(np.array_equal(found, other[name]) for name, found in one.items())


@given(problems())
def test_every_element_is_sent_by_one_rank_that_holds_it_and_what_more_hold_is_named_with_them(problem: tuple) -> None:
    specs, held, _ = problem
    sent = HolderMap.of(held).assign()
    by_rank = {rank: counts(specs, slices_of(placement)) for rank, placement in held.items()}
    assert list(sent) == list(held)
    assert {spec for placement in sent.values() for spec in placement.specs} == set(specs)
    total = counts(specs, itertools.chain.from_iterable(map(slices_of, sent.values())))
    assert all((found == 1).all() for found in total.values())
    for rank, placement in sent.items():
        assert all(by_rank[rank][name][box.index].all() for name, box in slices_of(placement))
    copies = {spec.name: sum(found[spec.name] for found in by_rank.values()) for spec in specs}
    said = counts(specs, ())
    for each in HolderMap.of(held).replicated():
        holders = [rank for rank in held if by_rank[rank][each.spec.name][each.box.index].any()]
        said[each.spec.name][each.box.index] += len(holders)
    assert all(np.array_equal(said[name], np.where(copies[name] > 1, copies[name], 0)) for name in said)


def copied(placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """The same from other objects, as in another process."""
    return {name: Placement.from_plain(placement.to_plain()) for name, placement in placements.items()}


@given(problems())
def test_every_needed_element_arrives_once_and_nothing_else_does_by_the_same_plan_everywhere(problem: tuple) -> None:
    """Where whole shares are shown, each sender has one lane to whoever needs any of it."""
    specs, held, needed = problem
    sent = HolderMap.of(held).assign()
    plan, whole = plans = [plan_transfer(sent, needed, cut=cut) for cut in ("exact", "shares")]
    for lane in plan.lanes:
        own = counts(specs, slices_of(sent[lane.sender]))
        assert all(own[cell.spec.name][cell.box.index].all() for cell in lane.cells)
        order = [(plan.specs.index(cell.spec), cell.box.starts) for cell in lane.cells]
        assert order == sorted(order)
        assert list(lane.receivers) == [name for name in needed if name in lane.receivers]
    for receiver, placement in needed.items():
        assert equal(counts(specs, arriving(plan, receiver)), counts(specs, slices_of(placement)))
    crossing = sum(lane.nbytes * len(lane.receivers) for lane in plan.lanes)
    assert crossing == sum(placement.nbytes for placement in needed.values())
    assert len({(lane.sender, lane.receivers) for lane in plan.lanes}) == len(plan.lanes)
    wanted: dict[str, set[str]] = {}
    for lane in plan.lanes:
        wanted.setdefault(lane.sender, set()).update(lane.receivers)
    assert {lane.sender: set(lane.receivers) for lane in whole.lanes} == wanted
    assert len(whole.lanes) == len(wanted)
    for lane in whole.lanes:
        cells = counts(specs, ((cell.spec.name, cell.box) for cell in lane.cells))
        assert equal(cells, counts(specs, slices_of(sent[lane.sender])))
    there = [plan_transfer(HolderMap.of(copied(held)).assign(), copied(needed), cut=cut) for cut in ("exact", "shares")]
    assert there == plans
    assert [each.digest for each in there] == [each.digest for each in plans]


@given(problems())
def test_no_rank_sends_much_more_than_it_must_whoever_holds_what(problem: tuple) -> None:
    """A set's busiest rank must send at least the bytes that only ranks of the set hold, divided by the number of its ranks."""
    _, held, _ = problem
    holdings = HolderMap.of(held)
    cells = [
        (set(holders), box.numel * spec.dtype.itemsize)
        for spec, found in zip(holdings.specs, holdings.cells, strict=True)
        for box, holders in found
    ]
    ranks = range(len(held))
    sets = itertools.chain.from_iterable(itertools.combinations(ranks, size) for size in range(1, len(ranks) + 1))
    least = max(sum(nbytes for holders, nbytes in cells if holders <= set(some)) / len(some) for some in sets)
    elements = 4 * len(
        {frozenset(holders) for holders, _ in cells}
    )  # which are not divided: one of 4 bytes for each set
    assert max(placement.nbytes for placement in HolderMap.of(held).assign().values()) <= 1.05 * least + elements


W = TensorSpec("w", (8, 4), BF16)
WHOLE = Placement.whole([W])


def of(*boxes: Box, spec: TensorSpec = W) -> Placement:
    return Placement.of((spec, box) for box in boxes)


def whole(*shape: int, dtype: torch.dtype = BF16) -> Placement:
    return Placement.whole([TensorSpec("w", shape, dtype)])


def test_a_rank_gets_its_slices_under_the_names_that_are_sent_and_nothing_of_what_it_does_not_read() -> None:
    w, mask = TensorSpec("h.w", (4, 8), BF16), TensorSpec("h.mask", (8,), BF16)
    rows = Box((2, 0), (2, 8))
    needed = Placement.of_boxes([(w, [rows]), (mask, [])])
    sent = TensorSpec("transformer.h.w", w.shape, BF16)
    buffer = TensorSpec("transformer.h.0.rotary_emb.inv_freq", (2,), torch.float32)  # that no file has
    for more in [], [TensorSpec("transformer.h.mask", (3,), torch.bool)], [buffer]:
        supply = Supply({"trainer-0": Placement.whole([sent, *more])}, 64, checksummed=True, quantised="")
        wanted = supply.on_the_wire(needed)
        assert wanted is not None
        assert [*wanted.slices] == [(sent, rows)]
        assert wanted.specs == supply.specs


def test_of_tied_tensors_one_is_sent_though_a_rank_that_holds_neither_lists_both() -> None:
    nothing = Box((0, 0), (0, 4))
    held = {"trainer-0": WHOLE, "trainer-1": Placement.of([(W, nothing), (TensorSpec("head", (8, 4), BF16), nothing)])}
    assert HolderMap.of(held).specs == (W,)


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ([of(Box((0, 0), (4, 4))), of(Box((5, 0), (3, 4)))], "no rank holds [4:5, 0:4] of w of shape [8, 4]"),
        ([of(Box((0, 0), (8, 2))), of(Box((0, 2), (4, 2)))], "no rank holds [4:8, 2:4] of w"),
        ([of(Box((0, 0), (0, 4)))], "trainer-0 names it and holds nothing of it"),
        ([WHOLE, whole(8, 5)], "w has shape [8, 4] on trainer-0 and [8, 5] on trainer-1"),
        ([WHOLE, whole(8, 4, dtype=torch.float32)], "w is bfloat16 on trainer-0 and float32 on trainer-1"),
        ([WHOLE, of(Box((4, 0), (5, 4)))], "has no slice [4:9, 0:4], which trainer-1 holds"),
    ],
)
def test_ranks_that_do_not_make_up_every_tensor_are_named_with_it(held: list[Placement], says: str) -> None:
    by_rank = {f"trainer-{rank}": placement for rank, placement in enumerate(held)}
    with pytest.raises(ManifestError) as caught:
        HolderMap.of(by_rank).assign()
    assert says in str(caught.value)
    assert caught.value.peer in by_rank
