"""Ranks of a collective engine post in one order under any plan, so that they never wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

import torch
from checked_device.group import Fleet, Group
from checked_device.streams import UNBOUNDED, names
from checked_device.tensors import installed
from checked_device.world import World
from hypothesis import given
from hypothesis import strategies as st

from weightlane.ckpt_engines import Bucket, Capabilities, Delivery
from weightlane.ckpt_engines.engines.torch_distributed.collective_halves import (
    CollectiveReceiver,
    CollectiveSender,
    ReceiverSet,
)
from weightlane.ckpt_engines.engines.torch_distributed.device_group import DeviceGroup
from weightlane.ckpt_engines.engines.torch_distributed.group_engine import TorchDistributedConfig
from weightlane.ckpt_engines.runtime.devices import runtime_of
from weightlane.sync.plan.links import PlannedLink
from weightlane.sync.plan.session_plan import SessionPlan, Supply
from weightlane.sync.version.box import Box
from weightlane.sync.version.placement import Placement
from weightlane.sync.version.tensor_spec import TensorSpec

FACTS = Capabilities(
    devices=frozenset({"cuda"}), delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}), collective=True
)
SPECS = [TensorSpec(f"t{number}", (8 + number, 16), torch.float32) for number in range(4)]


def shares(world: int) -> Iterator[Placement]:
    """The rows of every tensor, dealt out to so many ranks."""
    for rank in range(world):
        slices = []
        for spec in SPECS:
            first, last = (spec.shape[0] * each // world for each in (rank, rank + 1))
            slices.append((spec, Box((first, 0), (last - first, spec.shape[1]))))
        yield Placement.of(slices)


@st.composite
def plans(draw: st.DrawFn) -> SessionPlan:
    """Draw a session plan for some trainer ranks and some rollout ranks, with or without relays."""
    trainers = draw(st.integers(1, 3))
    cuts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    held = {f"trainer-{rank}": share for rank, share in enumerate(shares(trainers))}
    needed = {
        f"rollout-{number}/{rank}": share for number, cut in enumerate(cuts) for rank, share in enumerate(shares(cut))
    }
    relay = draw(st.sampled_from(["off", "chain", "tree"]))
    return SessionPlan.of(Supply(held, draw(st.sampled_from([256, 4096])), False, "", relay), needed, FACTS)


def members(link: PlannedLink) -> list[str]:
    return [*link.senders, *link.receivers]


@given(plans())
def test_links_of_a_collective_engine_are_few_and_nobody_sends_and_receives_on_one(plan: SessionPlan) -> None:
    carried = [(sender, lane, name) for link in plan.links for sender in link.senders for lane in link.lanes[sender]
               for name in link.receivers if (sender, name) in plan.routes[lane].hops]  # fmt: skip
    wanted = [(sender, lane, name) for lane, route in enumerate(plan.routes) for sender, name in route.hops]
    assert sorted(carried) == sorted(wanted), "every hop of every lane goes through one link, once"
    assert not any(set(link.senders) & set(link.receivers) for link in plan.links)
    if not plan.relays:
        receivers = [name for link in plan.links for name in link.receivers]
        assert len(receivers) == len(set(receivers)), "one communicator is enough there"


@given(plans(), st.randoms(use_true_random=False))
def test_the_operations_of_any_plan_meet_on_the_checked_device(plan: SessionPlan, random: Random) -> None:
    all_meet(plan, random)


def test_a_bucket_that_arrives_early_overtakes_no_broadcast_of_another_turn() -> None:
    """Three receivers, each in two of three sets of two: the second sender's first bucket goes past one of them."""
    held = {"trainer-0": Placement.whole(SPECS[:1]), "trainer-1": Placement.whole(SPECS[1:3])}
    needed = {f"rollout-{each}/0": Placement.whole(SPECS[first:last:step])
              for each, (first, last, step) in enumerate(((1, 3, 1), (0, 3, 2), (0, 2, 1)))}  # fmt: skip
    for seed in range(20):
        all_meet(SessionPlan.of(Supply(held, 4096, False, "", "off"), needed, FACTS), Random(seed))


def all_meet(plan: SessionPlan, random: Random) -> None:
    """Have the halves of every link post what the framework has them post, and flush now and then; every operation must end."""
    ranks = sorted({name for link in plan.links for name in members(link)})
    world = World(devices=1 + len(ranks))
    device_of = {name: number for number, name in enumerate(ranks, 1)}
    with installed(world, "cuda"):
        fleets: list[Fleet] = []
        halves: list[CollectiveSender | CollectiveReceiver] = []
        for link in plan.links:
            of_sets = [Fleet(world, len(names)) for names in link.receiver_sets]
            fleets += [Fleet(world, len(members(link))), *of_sets]
            connected = {
                name: connected_half(link, name, device_of[name], fleets[-1 - len(of_sets)], of_sets)
                for name in members(link)
            }
            halves += connected.values()
            post_all(plan, link, connected, device_of, random)
        for half in halves:
            half._start()
        assert world.broken <= {UNBOUNDED}, names(
            world.violations
        )  # this thread plays all members, which do not connect
        assert not any(parts for fleet in fleets for parts in fleet.parts.values()), "operations have not met"
        for half in halves:
            half.close()


def connected_half(link: PlannedLink, name: str, device: int, fleet: Fleet, of_sets: Sequence[Fleet]) -> Any:
    """A half that is connected to the others of its link."""
    kind = CollectiveSender if name in link.senders else CollectiveReceiver
    where = torch.device("cuda", device)
    made = kind(name, TorchDistributedConfig(), "nccl", where)
    made._ranks = {other: rank for rank, other in enumerate(members(link))}
    made._senders = len(link.senders)
    group: Any = Group(fleet, made._ranks[name], device)
    made._group = DeviceGroup(group, runtime_of(where), name, "")
    for names_of_set, of_set in zip(link.receiver_sets, of_sets, strict=True):
        beside = None
        if name in names_of_set:
            group = Group(of_set, names_of_set.index(name), device)
            beside = DeviceGroup(group, runtime_of(where), name, "", beside=made._group)
        made._sets += (ReceiverSet(names_of_set, beside),)
    return made


def post_all(
    plan: SessionPlan, link: PlannedLink, connected: Mapping[str, Any], device_of: Mapping[str, int], random: Random
) -> None:
    """Post one version on every member of `link`, in the order of the link's turns."""
    for turn, sender, lane, index in link.turns(plan.layout):
        to = plan.routes[lane].next_after(sender)
        start, stop = plan.layout.window(index)
        for name in (sender, *to):
            device = torch.device("cuda", device_of[name])
            data = torch.zeros(stop - start, dtype=torch.uint8, device=device)
            bucket = Bucket(
                1,
                index,
                data,
                runtime_of(device).record_event(),
                to_all=len(to) == len(link.receivers),
                receiver_set=link.receiver_sets.index(to) if to in link.receiver_sets else None,
                turn=turn,
            )
            connected[name].post(bucket, to if name == sender else sender)
            if random.random() < 0.2:
                connected[name]._start()
