"""Ranks of a collective engine post in one order under any plan, so that they never wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from checked_device.group import Fleet, Group
from checked_device.streams import UNBOUNDED, names
from checked_device.tensors import installed
from checked_device.world import World
from hypothesis import given
from hypothesis import strategies as st

from weightlane.ckpt_engines import Bucket, Capabilities, Delivery
from weightlane.ckpt_engines.engines.torch_distributed.collective_halves import CollectiveReceiver, CollectiveSender
from weightlane.ckpt_engines.engines.torch_distributed.device_group import DeviceGroup
from weightlane.ckpt_engines.engines.torch_distributed.group_engine import TorchDistributedConfig
from weightlane.ckpt_engines.runtime.devices import runtime_of
from weightlane.sync.plan.links import PlannedLink
from weightlane.sync.plan.plan_exchange import Supply
from weightlane.sync.plan.session_plan import SessionPlan
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
    cuts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    held = {f"trainer-{rank}": share for rank, share in enumerate(shares(trainers))}
    needed = {
        f"rollout-{number}/{rank}": share for number, cut in enumerate(cuts) for rank, share in enumerate(shares(cut))
    }
    relay = draw(st.sampled_from(["off", "chain", "tree"]))
    return SessionPlan(Supply(held, draw(st.sampled_from([256, 4096])), False, "", relay), needed, FACTS)


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


@given(plans())
def test_the_operations_of_any_plan_meet_on_the_checked_device(plan: SessionPlan) -> None:
    """The halves of every link post what the framework has them post, all at once; every operation must end."""
    ranks = sorted({name for link in plan.links for name in members(link)})
    world = World(devices=1 + len(ranks))
    device_of = {name: number for number, name in enumerate(ranks, 1)}
    with installed(world, "cuda"):
        fleets: list[Fleet] = []
        halves: list[CollectiveSender | CollectiveReceiver] = []
        for link in plan.links:
            fleets.append(Fleet(world, len(members(link))))
            connected = {name: connected_half(link, name, device_of[name], fleets[-1]) for name in members(link)}
            halves += connected.values()
            post_all(plan, link, connected, device_of)
        for half in halves:
            half._start()
        assert world.broken <= {UNBOUNDED}, names(
            world.violations
        )  # this thread plays all members, which do not connect
        assert not any(parts for fleet in fleets for parts in fleet.parts.values()), "operations have not met"
        for half in halves:
            half.close()


def connected_half(link: PlannedLink, name: str, device: int, fleet: Fleet) -> Any:
    """A half that is connected to the others of its link."""
    kind = CollectiveSender if name in link.senders else CollectiveReceiver
    where = torch.device("cuda", device)
    made = kind(name, TorchDistributedConfig(), "nccl", where)
    made._ranks = {other: rank for rank, other in enumerate(members(link))}
    made._senders = len(link.senders)
    group: Any = Group(fleet, made._ranks[name], device)
    made._group = DeviceGroup(group, runtime_of(where), name, "")
    return made


def post_all(plan: SessionPlan, link: PlannedLink, connected: Mapping[str, Any], device_of: Mapping[str, int]) -> None:
    """Post one version on every member of `link`, in the order of the link's turns."""
    for sender, lane, index in link.turns(plan.layout):
        to = [receiver for receiver in link.receivers if (sender, receiver) in plan.routes[lane].hops]
        start, stop = plan.layout.window(index)
        for name in (sender, *to):
            device = torch.device("cuda", device_of[name])
            data = torch.zeros(stop - start, dtype=torch.uint8, device=device)
            bucket = Bucket(1, index, data, runtime_of(device).record_event(), to_all=len(to) == len(link.receivers))
            connected[name].post(bucket, to if name == sender else sender)
