"""The engines of devices, on simulated ones: up to four senders and four receivers, none on device 0."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checked_device.driver import Driver
from checked_device.group import Fleet, opens_groups
from checked_device.streams import (
    FREED,
    NO_WAIT,
    ORDER,
    OTHER_BYTES,
    REUSED,
    TRAINER,
    WRONG_DEVICE,
    Stream,
    names,
)
from checked_device.tensors import CheckedTensor, installed
from checked_device.verls_engine import VerlsEngine
from checked_device.world import World
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngine,
    CheckpointEngineRegistry,
    ConfigError,
    Deadline,
    DeadlineExceededError,
    PeerLostError,
    Topology,
    TransportError,
    WeightlaneError,
)
from weightlane.ckpt_engines.engines.shared_memory import cuda_ipc as _cuda_ipc
from weightlane.ckpt_engines.engines.torch_distributed import device_group as _device_group
from weightlane.ckpt_engines.links import ReceiverLink, SenderLink
from weightlane.ckpt_engines.runtime.devices import runtime_of

KINDS = {"nccl": "cuda", "hccl": "privateuseone", "cuda_ipc": "cuda", "verl": "cuda"}
"""Type of the simulated devices. torch knows that of NPUs by another name as long as torch_npu is not there."""
SENDERS, RECEIVERS = ["t/0", "t/1", "t/2", "t/3"], ["r-0/0", "r-0/1", "r-1/0", "r-1/1"]
Sets = tuple[tuple[str, ...], ...]
"""Sets of receivers that pass buckets on."""
ALL: Sets = (tuple(RECEIVERS),)
TP: Sets = (("r-0/0", "r-1/0"), ("r-0/1", "r-1/1"))
"""The ranks of two replicas that need the same slices."""
SIZES = [4096, 1, 0, 3000, 1 << 16, 17, 4096, 4096]


@contextlib.contextmanager
def devices_of(engine: str, queues: int = 8) -> Iterator[World]:
    """A world in which `engine` finds its devices."""
    world = World(1 + len(SENDERS) + len(RECEIVERS), queues)
    patch = pytest.MonkeyPatch()

    patch.setattr(_device_group, "open_process_group", opens_groups(world))
    patch.setattr(_cuda_ipc, "cuda_driver", lambda: Driver(world))
    patch.setattr("weightlane_verl_engines._verl_class", lambda _: VerlsEngine)
    try:
        with installed(world, KINDS[engine]):
            yield world
    finally:
        patch.undo()


def payload(sender: str, index: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * SENDERS.index(sender) + index)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


Turn = tuple[str, int, int]
"""A bucket's sender, index and size."""


def everybody(_sender: str, _index: int) -> Sequence[str]:
    return ALL[0]


def ranks_of_replicas(sender: str, index: int) -> Sequence[str]:
    """Two of three buckets are for one rank of each replica; another one for each sender."""
    return (*TP, *ALL)[(SENDERS.index(sender) + index) % 3]


Receivers = Callable[[str, int], Sequence[str]]
"""Receivers of a sender's bucket with an index."""


class Trainer:
    """One that sends: buckets are filled on a stream of the snapshot's, in few places, while the training goes on."""

    def __init__(self, world: World, engine: CheckpointEngine, kind: str, name: str, device: int) -> None:
        self.name, self.world, self.device = name, world, torch.device(kind, device)
        self.link: SenderLink = SenderLink.of(engine, name, self.device)
        self.runtime = runtime_of(self.device)
        self.stream: Stream = self.runtime.stream_for(self)
        self.allocate = engine.allocate
        self.free = engine.free

    def train(self, _index: int) -> None:
        """Start what the training does before the bucket of this index is posted."""

    def send(self, receivers: Receivers, sizes: Sequence[int], at_once: int = 3) -> None:
        deadline = Deadline.after(HANG_S)
        with self.world.training(self.device.index), self.runtime.on(self.stream):
            places = [self.allocate(max(sizes), self.device) for _ in range(at_once)]
            under_way: deque[int] = deque()
            for index, nbytes in enumerate(sizes):
                if len(under_way) == at_once:
                    self.link.flush(deadline, at_once - 1)
                    under_way.popleft()
                data = places[index % at_once][:nbytes]
                data.copy_(payload(self.name, index, nbytes))
                after = self.runtime.record_event(self.stream)
                self.train(index)
                self.link.post(Bucket(1, index, data, after), receivers(self.name, index), deadline)
                under_way.append(index)
            self.link.flush(deadline)
            for place in places:
                place.fill_(0)
                self.free(place)


class Rollout:
    """One that receives, into memory that other work of its device has just used, and reads it on a stream of its own."""

    def __init__(self, world: World, engine: CheckpointEngine, kind: str, name: str, device: int) -> None:
        self.name, self.world, self.device = name, world, torch.device(kind, device)
        self.link: ReceiverLink = ReceiverLink.of(engine, name, self.device)
        self.runtime = runtime_of(self.device)
        self.stream: Stream = self.runtime.stream_for(self)

    def receive(self, turns: Sequence[Turn], at_once: int = 3) -> None:
        """Buckets, in this order."""
        deadline = Deadline.after(HANG_S)
        under_way: deque[tuple[str, int, CheckedTensor]] = deque()

        def end_oldest() -> None:
            self.link.flush(deadline, len(under_way) - 1)
            sender, index, data = under_way.popleft()
            if not torch.equal(data.cpu(), payload(sender, index, data.numel())):
                self.world.violate(OTHER_BYTES, f"{self.name} got them as bucket {index} of {sender}")

        with self.runtime.on(self.stream):
            for sender, index, nbytes in turns:
                if len(under_way) == at_once:
                    end_oldest()
                data: Any = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
                after = self.runtime.record_event(self.stream)
                self.link.post(Bucket(1, index, data, after, turn=index), sender, deadline)
                under_way.append((sender, index, data))
                del data
            while under_way:
                end_oldest()


def in_turns(senders: Sequence[str], _place: int) -> list[Turn]:
    """Senders take turns, for every receiver in the same way."""
    return [(sender, index, nbytes) for index, nbytes in enumerate(SIZES) for sender in senders]


def carry(
    world: World,
    name: str,
    tmp_path: Path,
    senders: int = 2,
    *,
    order: Callable[[Sequence[str], int], Sequence[Turn]] = in_turns,
    at_once: int = 3,
    to: Receivers = everybody,
    sets: Sets = (),
) -> None:
    """Connect, and send everything from everybody `to` whom that says; receivers expect it in an `order`."""
    options = {"cuda_ipc": {"socket_dir": str(tmp_path)}, "verl": {"backend": "nccl"}}.get(name, {})
    kind = KINDS[name]
    registry = CheckpointEngineRegistry()
    made = registry.engine_class(name)(registry.validate_options(name, options))
    engines = [made, *(registry.engine_class(name)(registry.validate_options(name, options)) for _ in range(7))]
    trainers = [Trainer(world, engines[place], kind, each, place + 1) for place, each in enumerate(SENDERS[:senders])]
    rollouts = [Rollout(world, engines[4 + place], kind, each, place + 5) for place, each in enumerate(RECEIVERS)]
    links: list[SenderLink | ReceiverLink] = [each.link for each in (*trainers, *rollouts)]
    topology = Topology(
        "s-1",
        {each.name: each.link.address() for each in trainers},
        {each.name: each.link.address() for each in rollouts},
        key=b"k",
        receiver_sets=sets,
    )
    names_of_senders = [each.name for each in trainers]
    with ThreadPoolExecutor(len(links)) as threads:
        for connecting in [threads.submit(link.connect, topology, Deadline.after(HANG_S)) for link in links]:
            connecting.result()
        world.sent.clear()
        work: list[Callable[[], None]] = [partial(each.send, to, SIZES, at_once) for each in trainers]
        for place, each in enumerate(rollouts):
            turns = [turn for turn in order(names_of_senders, place) if each.name in to(*turn[:2])]
            work.append(partial(each.receive, turns, at_once))
        running = [threads.submit(each) for each in work]
        first, _ = wait(running, return_when=FIRST_EXCEPTION)
        for link in links:  # a call that is not over waits for who has failed
            link.close()
        for ended in (*first, *running):
            ended.result(HANG_S)


@pytest.mark.parametrize("rule", [None, NO_WAIT, REUSED, TRAINER, WRONG_DEVICE])
def test_the_simulation_finds_the_rule_that_a_program_breaks(rule: str | None) -> None:
    with devices_of("nccl") as world:
        device, other = torch.device("cuda", 1), torch.device("cuda", 2)
        runtime = runtime_of(device)
        reading, writing = (runtime.stream_for(world) for _ in range(2))
        memory: Any = torch.zeros(8, dtype=torch.uint8, device=device)
        if rule != NO_WAIT:
            runtime.wait_for(reading, runtime.record_event(world.default[1]))
        with runtime.on(reading):
            memory.sum()
        runtime.wait_for(writing, runtime.record_event(world.default[1] if rule == REUSED else reading))
        with world.training(1), runtime.on(writing):
            if rule == TRAINER:
                runtime.wait_for(writing, runtime.record_event(world.default[1]))
            memory.zero_()
            if rule == WRONG_DEVICE:
                memory.copy_(torch.zeros(8, dtype=torch.uint8, device=other))
        assert rule in world.broken or not (rule or world.violations), names(world.violations)


@pytest.mark.parametrize(
    ("engine", "senders", "to", "sets"),
    [
        pytest.param("nccl", 1, everybody, (), id="nccl-1"),
        pytest.param("nccl", 2, everybody, (), id="nccl-2"),
        pytest.param("nccl", 2, everybody, ALL, id="nccl-2-all", marks=pytest.mark.exhaustive),
        pytest.param("nccl", 4, everybody, ALL, id="nccl-4-all"),
        pytest.param("nccl", 1, ranks_of_replicas, TP, id="nccl-1-tp"),
        pytest.param("nccl", 4, ranks_of_replicas, TP, id="nccl-4-tp"),
        pytest.param("hccl", 1, everybody, (), id="hccl-1"),
        pytest.param("hccl", 4, ranks_of_replicas, (*TP, *ALL), id="hccl-4-tp"),
        pytest.param("cuda_ipc", 2, everybody, (), id="cuda_ipc-2"),
        pytest.param("verl", 2, everybody, (), id="verl-2"),
    ],
)
def test_engines_of_devices_break_no_rule(engine: str, senders: int, to: Receivers, sets: Sets, tmp_path: Path) -> None:
    """A sender sends each byte once if it is broadcast, by one sender to all or by a set of receivers; else once to each."""
    with devices_of(engine) as world:
        carry(world, engine, tmp_path, senders, to=to, sets=sets)
        assert not world.violations, names(world.violations)
        broadcast = {*sets, *(ALL if senders == 1 else ())}
        for number, name in enumerate(SENDERS[:senders] if engine in ("nccl", "hccl") else (), 1):
            sends = [1 if to(name, index) in broadcast else len(to(name, index)) for index in range(len(SIZES))]
            assert world.sent[number] == sum(n * size for n, size in zip(sends, SIZES, strict=True))


def test_a_verl_engine_that_cannot_be_made_is_a_typed_error_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    for makes, expected in (
        (lambda **_: {}["no such name"], TransportError),
        (lambda: None, ConfigError),
        (lambda **_: ended.wait(HANG_S), DeadlineExceededError),
    ):
        monkeypatch.setattr("weightlane_verl_engines._verl_class", lambda _, makes=makes: makes)
        engine = CheckpointEngineRegistry().engine_class("verl")
        half = engine(engine.config_type(backend="nccl")).make_receiver("r", torch.device("cpu"))  # type: ignore[call-arg]
        channel: Any = SimpleNamespace(belong_to=lambda _: None)
        short = expected is DeadlineExceededError
        with pytest.raises(expected, match="verl"):
            half.connect(Topology("s-1", {}, {}), {"t": channel}, Deadline.after(0.05 if short else HANG_S))
        half.close()
    ended.set()


def test_a_receiver_that_dies_is_named_by_the_senders_and_all_communicators_are_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = Rollout.receive

    def die(self: Rollout, turns: Sequence[Turn], at_once: int) -> None:
        dies = self.name == RECEIVERS[2]
        received(self, turns[:5] if dies else turns, at_once)
        if dies:
            self.link.close()

    monkeypatch.setattr(Rollout, "receive", die)
    with devices_of("nccl") as world:
        with pytest.raises(PeerLostError) as lost:
            carry(world, "nccl", tmp_path, senders=4, sets=ALL)
        assert lost.value.peer == RECEIVERS[2]
        assert len(world.fleets) == 2
        wait_until(lambda: all(fleet.let_go == fleet.parts.keys() for fleet in world.fleets), "the aborts")
        assert not world.violations, names(world.violations)


def test_connections_one_after_the_other_take_few_streams() -> None:
    with devices_of("nccl") as world:
        for _ in range(40):
            _device_group.DeviceGroup(None, runtime_of(torch.device("cuda", 1)), "half", "")  # type: ignore[arg-type]
        assert not world.violations, names(world.violations)


def one_after_the_other(senders: Sequence[str], place: int) -> list[Turn]:
    """A receiver takes everything from one sender first, and every second one from another."""
    ordered = senders if place % 2 else senders[::-1]
    return [(sender, index, nbytes) for sender in ordered for index, nbytes in enumerate(SIZES)]


def sets_of_neighbours(sender: str, _index: int) -> Sequence[str]:
    """Two sets with two receivers in common, one for each sender."""
    first = SENDERS.index(sender)
    return tuple(RECEIVERS[first : first + 3])


@pytest.mark.parametrize(
    ("to", "sets"),
    [(everybody, ()), (sets_of_neighbours, (tuple(RECEIVERS[:3]), tuple(RECEIVERS[1:])))],
    ids=["one communicator", "two communicators"],
)
def test_members_that_keep_different_orders_are_told_so_and_do_not_hang(
    to: Receivers, sets: Sets, tmp_path: Path
) -> None:
    with devices_of("nccl") as world:
        with contextlib.suppress(WeightlaneError):
            carry(world, "nccl", tmp_path, order=one_after_the_other, at_once=2 * len(SIZES), to=to, sets=sets)
        assert ORDER in world.broken, names(world.violations)


@pytest.mark.parametrize(
    ("queues", "seeds"),
    [(8, range(4)), (1, range(4)), pytest.param(8, range(4, 20), marks=pytest.mark.exhaustive)],
    ids=["8 queues", "1 queue", "8 queues, more seeds"],
)
def test_collectives_of_the_training_come_in_any_order_unless_one_hardware_queue_orders_everything(
    queues: int, seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks start them before other buckets. `nccl` refuses a process that has one queue; here it is not asked."""
    circles = 0
    for seed in seeds:
        random, steps = Random(seed), 4
        at = {name: sorted(random.choices(range(len(SIZES)), k=steps)) for name in SENDERS}
        with devices_of("nccl", queues) as world:
            training, computing = Fleet(world, len(SENDERS)), [world.stream(n + 1) for n in range(len(SENDERS))]
            memory: list[Any] = [torch.empty(8, device=torch.device("cuda", each.device)) for each in computing]
            for rank, stream in enumerate(computing):
                training.join(rank, stream.device)

            def train(
                trainer: Trainer, index: int, at=at, training=training, computing=computing, memory=memory
            ) -> None:
                rank = SENDERS.index(trainer.name)
                for step in (step for step, before in enumerate(at[trainer.name]) if before == index):
                    with trainer.world.on_stream(computing[rank]):
                        training.start(rank, {(0, -1, step): (memory[rank].block, 0, 8)})

            monkeypatch.setattr(Trainer, "train", train)
            with contextlib.suppress(WeightlaneError):
                carry(world, "nccl", tmp_path, senders=len(SENDERS))
            assert queues == 1 or not world.violations, names(world.violations)
            circles += ORDER in world.broken
    assert queues > 1 or circles, "nobody waits in a circle"


def test_memory_that_its_owner_drops_stays_until_the_transfer_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket is posted, and given up: nobody waits for it, and nobody holds it."""

    def give_up(self: Trainer | Rollout, *arguments: Any) -> None:
        del arguments
        with self.runtime.on(self.stream):
            data: Any = torch.zeros(64, dtype=torch.uint8, device=self.device)
            bucket = Bucket(1, 0, data, self.runtime.record_event(self.stream))
            if isinstance(self, Trainer):
                self.link.post(bucket, RECEIVERS, Deadline.after(HANG_S))
            else:
                self.link.half.post(bucket, SENDERS[0])  # the headers do not matter
            self.link.half._posted.clear()  # type: ignore[attr-defined]
            self.link.half._unstarted.clear()  # type: ignore[attr-defined]

    monkeypatch.setattr(Trainer, "send", give_up)
    monkeypatch.setattr(Rollout, "receive", give_up)
    with devices_of("nccl") as world:
        carry(world, "nccl", tmp_path, senders=1)
        assert FREED not in world.broken, names(world.violations)
