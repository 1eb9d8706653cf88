"""The engines of devices, on pretended ones: two senders and three receivers, none on device 0, whatever streams do when."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_device.driver import Driver
from checked_device.group import open_group
from checked_device.streams import (
    FREED,
    NO_WAIT,
    ORDER,
    OTHER_BYTES,
    REUSED,
    SAME_STREAM,
    TRAINER,
    UNBOUNDED,
    WRONG_DEVICE,
    Stream,
    names,
)
from checked_device.tensors import CheckedTensor, installed
from checked_device.world import World
from waiting import HANG_S

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngine,
    CheckpointEngineRegistry,
    Deadline,
    Topology,
    WeightlaneError,
)
from weightlane.ckpt_engines.engines.shared_memory import cuda_segments as _cuda_segments
from weightlane.ckpt_engines.engines.torch_distributed import collective_halves as _collective_halves
from weightlane.ckpt_engines.engines.torch_distributed import device_group as _device_group
from weightlane.ckpt_engines.links.receiver_link import ReceiverLink, make_receiver_link
from weightlane.ckpt_engines.links.sender_link import SenderLink, make_sender_link
from weightlane.ckpt_engines.runtime.devices import AcceleratorRuntime, runtime_of

KINDS = {"nccl": "cuda", "hccl": "privateuseone", "cuda_ipc": "cuda"}
"""Type of the pretended devices. torch knows that of NPUs by another name as long as torch_npu is not there."""
SENDERS, RECEIVERS = ["t/0", "t/1"], ["r-0/0", "r-0/1", "r-1/0"]
SIZES = [4096, 1, 0, 3000, 1 << 16, 17, 4096, 4096]


@contextlib.contextmanager
def devices_of(engine: str) -> Iterator[World]:
    """A world in which `engine` finds its devices. Vector clocks find a missing wait in whatever order streams get on."""
    world = World(0, devices=1 + len(SENDERS) + len(RECEIVERS))
    patch = pytest.MonkeyPatch()

    def group(backend: str, store: Any, rank: int, size: int, *_: Any, device: torch.device, **__: Any) -> Any:
        if world.current_device != device.index:
            world.violate(WRONG_DEVICE, f"a communicator of {device} is opened while another device is current")
        return open_group(world, store, rank, size, device.index, backend=backend)

    patch.setattr(_device_group, "open_process_group", group)
    patch.setattr(_cuda_segments, "cuda_driver", lambda: Driver(world))
    try:
        with installed(world, KINDS[engine]):
            yield world
    finally:
        patch.undo()
        world.close()


def payload(sender: str, index: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * SENDERS.index(sender) + index)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


Turn = tuple[str, int, int]
"""A bucket's sender, index and size."""


class Trainer:
    """One that sends: buckets are filled on a stream of the snapshot's, in few places, while the training goes on."""

    def __init__(self, world: World, engine: CheckpointEngine, kind: str, name: str, device: int) -> None:
        self.name, self.world, self.device = name, world, torch.device(kind, device)
        self.link: SenderLink = make_sender_link(engine, name, self.device)
        self.runtime = runtime_of(self.device)
        self.stream: Stream = self.runtime.stream_for(self)
        self.allocate = engine.allocate
        self.free = engine.free

    def train(self) -> threading.Event:
        """A step begins on this thread's stream, and does not end before it is told to."""
        over = threading.Event()
        training = self.world.current_stream(self.device.index)
        self.world.forbid(training)
        training.put("a step", lambda: None, ready=over.is_set)
        return over

    def send(self, receivers: Sequence[str], sizes: Sequence[int], at_once: int = 3) -> None:
        over, deadline = self.train(), Deadline.after(HANG_S)
        try:
            with self.runtime.on(self.stream):
                places = [self.allocate(max(sizes), self.device) for _ in range(at_once)]
                under_way: deque[int] = deque()
                for index, nbytes in enumerate(sizes):
                    if len(under_way) == at_once:
                        self.link.flush(deadline, at_once - 1)
                        under_way.popleft()
                    data = places[index % at_once][:nbytes]
                    data.copy_(payload(self.name, index, nbytes))
                    after = self.runtime.record_event(self.stream)
                    self.link.post(Bucket(1, index, data, after), receivers, deadline)
                    under_way.append(index)
                self.link.flush(deadline)
                for place in places:
                    place.fill_(0)
                    self.free(place)
        finally:
            over.set()


class Rollout:
    """One that receives, into memory that other work of its device has just used, and reads it on a stream of its own."""

    def __init__(self, world: World, engine: CheckpointEngine, kind: str, name: str, device: int) -> None:
        self.name, self.world, self.device = name, world, torch.device(kind, device)
        self.link: ReceiverLink = make_receiver_link(engine, name, self.device)
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
                self.link.post(Bucket(1, index, data, self.runtime.record_event(self.stream)), sender, deadline)
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
) -> None:
    """Connect, and send everything from everybody to everybody; receivers expect it in an `order`."""
    options = {"socket_dir": str(tmp_path)} if name == "cuda_ipc" else {}
    kind = KINDS[name]
    registry = CheckpointEngineRegistry()
    made = registry.engine_class(name)(registry.validate_options(name, options))
    engines = [made, *(registry.engine_class(name)(registry.validate_options(name, options)) for _ in range(4))]
    trainers = [Trainer(world, engines[place], kind, each, place + 1) for place, each in enumerate(SENDERS[:senders])]
    rollouts = [Rollout(world, engines[2 + place], kind, each, place + 3) for place, each in enumerate(RECEIVERS)]
    links: list[SenderLink | ReceiverLink] = [each.link for each in (*trainers, *rollouts)]
    topology = Topology(
        "s-1",
        {each.name: each.link.address() for each in trainers},
        {each.name: each.link.address() for each in rollouts},
        key=b"k",
    )
    everybody = [each.name for each in rollouts]
    names_of_senders = [each.name for each in trainers]
    with ThreadPoolExecutor(len(links)) as threads:
        for connecting in [threads.submit(link.connect, topology, Deadline.after(HANG_S)) for link in links]:
            connecting.result()
        work: list[Callable[[], None]] = [
            *(partial(each.send, everybody, SIZES, at_once) for each in trainers),
            *(partial(each.receive, order(names_of_senders, place), at_once) for place, each in enumerate(rollouts)),
        ]
        running = [threads.submit(each) for each in work]
        left = set(running)
        while left and not world.violations and all(each.exception() is None for each in set(running) - left):
            left = wait(left, 0.02, FIRST_EXCEPTION).not_done
        if left:  # they may wait for ever, for who has failed or for what was done wrong
            world.release()
            for link in links:
                link.close()
        for each in running:
            each.result(HANG_S)
    for link in links:
        link.close()


@pytest.mark.parametrize(("engine", "senders"), [("nccl", 2), ("nccl", 1), ("hccl", 2), ("hccl", 1), ("cuda_ipc", 2)])
def test_engines_of_devices_break_no_rule(engine: str, senders: int, tmp_path: Path) -> None:
    """Buckets that everybody gets from one sender are broadcast."""
    with devices_of(engine) as world:
        carry(world, engine, tmp_path, senders)
        assert not world.violations, names(world.violations)


@pytest.mark.parametrize("again", [True, False])
def test_connections_one_after_the_other_take_few_streams(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not again:
        monkeypatch.setattr(AcceleratorRuntime, "stream_for", lambda self, _: self._module.Stream(self.device))
    with devices_of("nccl") as world:
        for _ in range(40):
            _device_group.DeviceGroup(None, runtime_of(torch.device("cuda", 1)), "half", "")  # type: ignore[arg-type]
        assert world.broken == (set() if again else {SAME_STREAM}), names(world.violations)


# -- each rule, and who breaks it -----------------------------------------------------------------------------------------


def on_the_current_device(world: World, patch: pytest.MonkeyPatch) -> None:
    """Make an engine open its device group on the thread's current device, not on the device it was given."""
    real = _collective_halves.open_device_group

    def current(backend: Any, device: torch.device, *arguments: Any, **more: Any) -> Any:
        return real(backend, torch.device(device.type, world.current_device), *arguments, **more)

    patch.setattr(_collective_halves, "open_device_group", current)


def mapped_on_the_first_device(_: World, patch: pytest.MonkeyPatch) -> None:
    """Make an engine map memory on device 0, as if the device had no index."""
    real = _cuda_segments.CudaMapping

    def first(runtime: Any, *arguments: Any) -> Any:
        return real(runtime_of(torch.device(runtime.device.type, 0)), *arguments)

    patch.setattr(_cuda_segments, "CudaMapping", first)


def without_waiting(_: World, patch: pytest.MonkeyPatch) -> None:
    """The event of the snapshot is left alone."""
    patch.setattr(AcceleratorRuntime, "wait_for", lambda *_: None)


def behind_the_training(world: World, patch: pytest.MonkeyPatch) -> None:
    """Make a stream wait for the device's default stream, where training runs, instead of the snapshot's event."""
    patch.setattr(
        AcceleratorRuntime, "wait_for", lambda _self, stream, _event: stream.wait_stream(world.default[stream.device])
    )


def at_once_done(_: World, patch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the end of a transfer."""
    patch.setattr(_device_group.DeviceTransfer, "done", lambda _: True)


def copied_at_once(_: World, patch: pytest.MonkeyPatch) -> None:
    """A copy out of the sender's memory counts as done when it was started."""
    real = _cuda_segments.CudaMapping.start_copy

    def start(self: Any, *arguments: Any) -> Callable[[], bool]:
        real(self, *arguments)
        return lambda: True

    patch.setattr(_cuda_segments.CudaMapping, "start_copy", start)


def connected_by_a_broadcast(_: World, patch: pytest.MonkeyPatch) -> None:
    """Let pairs connect when they first transfer something."""

    def warm_up(self: Any, _senders: int, deadline: Deadline) -> None:
        self._finish([self._byte(0, None)], "the first collective", deadline)

    patch.setattr(_device_group.DeviceGroup, "warm_up", warm_up)


@pytest.mark.parametrize(
    ("engine", "broken", "rule"),
    [
        ("nccl", connected_by_a_broadcast, UNBOUNDED),
        ("nccl", on_the_current_device, WRONG_DEVICE),
        ("cuda_ipc", mapped_on_the_first_device, WRONG_DEVICE),
        ("nccl", without_waiting, NO_WAIT),
        ("cuda_ipc", without_waiting, NO_WAIT),
        ("nccl", behind_the_training, TRAINER),
        ("nccl", at_once_done, REUSED),
        ("cuda_ipc", copied_at_once, REUSED),
    ],
)
def test_an_engine_that_breaks_a_rule_is_told_which(
    engine: str,
    broken: Callable[[World, pytest.MonkeyPatch], None],
    rule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with devices_of(engine) as world:
        broken(world, monkeypatch)
        with contextlib.suppress(WeightlaneError):  # it may notice, or not
            carry(world, engine, tmp_path)
        # Memory that a transfer still uses is read too early, or written to: whichever comes first is told.
        told = {REUSED, NO_WAIT} if rule == REUSED else {rule}
        assert told & world.broken, names(world.violations)


def one_after_the_other(senders: Sequence[str], place: int) -> list[Turn]:
    """A receiver takes everything from one sender first, and every second one from another."""
    ordered = senders if place % 2 else senders[::-1]
    return [(sender, index, nbytes) for sender in ordered for index, nbytes in enumerate(SIZES)]


def test_members_that_keep_different_orders_are_told_so_and_do_not_hang(tmp_path: Path) -> None:
    with devices_of("nccl") as world:
        with contextlib.suppress(WeightlaneError):
            carry(world, "nccl", tmp_path, order=one_after_the_other, at_once=2 * len(SIZES))
        assert ORDER in world.broken, names(world.violations)


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_that_its_owner_drops_stays_until_the_transfer_is_over(
    keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket is posted, and given up: nobody waits for it, and nobody holds it."""
    if not keeps:
        monkeypatch.setattr(AcceleratorRuntime, "record_stream", lambda *_: None)

    def give_up(self: Trainer | Rollout, *arguments: Any) -> None:
        del arguments
        self.world.hold.set()  # nothing gets on meanwhile
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
        world.hold.clear()
        assert (FREED in world.broken) is not keeps, names(world.violations)
