"""A publisher and a subscriber on simulated devices: whole versions and deltas, beside a training and a decode that go on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_device.driver import Driver
from checked_device.group import opens_groups
from checked_device.streams import NO_WAIT, names
from checked_device.tensors import installed
from checked_device.world import World
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import CheckpointEngineRegistry, Deadline, WeightlaneError
from weightlane.ckpt_engines.engines.shared_memory import cuda_ipc as _cuda_ipc
from weightlane.ckpt_engines.engines.torch_distributed import device_group as _device_group
from weightlane.ckpt_engines.engines.torch_distributed.nccl import NcclEngine
from weightlane.ckpt_engines.runtime.devices import CudaRuntime, DeviceRuntime, runtime_of
from weightlane.sync import (
    CommitReport,
    Coordinator,
    Expectation,
    ExpectedTensor,
    LiveStream,
    LocalShard,
    Placement,
    Publisher,
    Rendezvous,
    Subscriber,
    SyncConfig,
    SyncReport,
    TensorSpec,
)
from weightlane.sync.codecs.delta.format import cuda_kernels
from weightlane.sync.codecs.delta.staged_delta import StagedDelta
from weightlane.sync.version.manifest import Manifest

ROLLOUT_DEVICE = torch.device("cuda", 2)
"""The first replica's beside one trainer rank. None is on number 0, which is current in every new thread."""
SHAPES = {"norm": (7,), "bias": (5,), "wide": (64, 96), "tall": (700, 3)}
SPECS = {name: TensorSpec(name, shape, torch.bfloat16) for name, shape in SHAPES.items()}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, bool]]:
    """Host memory that CUDA was told of: where it begins, one past its end, and whether it is mapped to be read only."""
    found: dict[int, tuple[int, bool]] = {}

    def register(_: CudaRuntime, address: int, nbytes: int, *, read_only: bool = False) -> bool:
        found[address] = address + nbytes, read_only
        return True

    monkeypatch.setattr(CudaRuntime, "register_host", register)
    monkeypatch.setattr(CudaRuntime, "unregister_host", lambda _, address: found.pop(address))
    return found


@pytest.fixture
def world(registered: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(devices=6)
    monkeypatch.setattr(_device_group, "open_process_group", opens_groups(made))
    monkeypatch.setattr(NcclEngine, "unavailable_reason", lambda: None)
    monkeypatch.setattr(_cuda_ipc, "cuda_driver", lambda: Driver(made))
    monkeypatch.setattr(cuda_kernels, "_kernels", lambda: None)  # Triton's programs run on real tensors only
    with installed(made, "cuda"):
        yield made


def values(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Replica:
    """A rollout rank whose model is on a device."""

    def __init__(self, name: str, device: torch.device, *given: Any) -> None:
        self.name, self.device = name, device
        self.look: Callable[[Iterable[torch.Tensor]], object] = list
        self.model: dict[str, Any] = {
            name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in SHAPES.items()
        }
        runtime_of(device).synchronize()
        expected = {name: ExpectedTensor(shape, frozenset({torch.bfloat16})) for name, shape in SHAPES.items()}
        self.subscriber = Subscriber(f"{name}/0", *given, Expectation(expected), device=device)

    def subscriber_names(self) -> list[str]:
        return [f"{self.name}/0"]

    async def commit(self, version: int) -> CommitReport:
        runtime = runtime_of(self.device)
        if (delta := self.subscriber.take_delta(version)) is not None:
            with runtime.on(runtime.stream_for(runtime)):
                delta.swap(self.model)
                runtime.synchronize()
            return CommitReport(version, blocked_s=0.0)
        with runtime.on(runtime.stream_for(runtime)):
            taken = self.subscriber.take(version)
            self.look(taken.values())
            for name, tensor in taken.items():
                self.model[name].copy_(tensor, non_blocking=True)
            runtime.synchronize()
        self.subscriber.release(version)
        return CommitReport(version, blocked_s=0.0)

    async def rollback(self, version: int) -> None:
        raise AssertionError(version)

    async def quarantine(self, error: WeightlaneError) -> None:
        raise error

    def holds(self, expected: dict[str, torch.Tensor]) -> bool:
        runtime = runtime_of(self.device)
        with runtime.on(runtime.stream_for(runtime)):
            return all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in self.model.items())


def rows(rank: int, world: int) -> dict[str, slice]:
    return {name: slice(*(shape[0] * each // world for each in (rank, rank + 1))) for name, shape in SHAPES.items()}


class Run:
    """Trainer ranks, each with its rows, and rollout ranks, in this process."""

    def __init__(
        self, world: World, tmp_path: Path, engine: str, trainers: int = 1, replicas: int = 1, **more: Any
    ) -> None:
        self.world = world
        options = {"socket_dir": str(tmp_path)} if engine in ("shm", "cuda_ipc") else {}
        rendezvous = Rendezvous.host()
        self.live = [self.on_device(torch.device("cuda", 1 + rank), 0) for rank in range(trainers)]
        first = 1 + trainers
        self.replicas = [
            Replica(f"rollout-{number}", torch.device("cuda", first + number), rendezvous.address, engine, options)
            for number in range(replicas)
        ]
        held = [
            [
                LocalShard(SPECS[name], (part.start, *[0] * (len(SHAPES[name]) - 1)), live[name][part])
                for name, part in rows(rank, trainers).items()
            ]
            for rank, live in enumerate(self.live)
        ]
        config = SyncConfig(bucket_mib=1 / 256, deadline_s=HANG_S, retries=0, **more)
        self.publishers = [
            Publisher(
                f"trainer-{rank}",
                rendezvous.address,
                shards=shards,
                engine=CheckpointEngineRegistry().create(engine, options),
                config=config,
                rank=rank,
                placements=[Placement.of_shards(each) for each in held],
            )
            for rank, shards in enumerate(held)
        ]
        names = [publisher.name for publisher in self.publishers]
        self.coordinator = Coordinator(rendezvous, names, self.replicas, config)

    @staticmethod
    def on_device(device: torch.device, version: int) -> dict[str, Any]:
        made = {name: torch.zeros(shape, dtype=torch.float32, device=device) for name, shape in SHAPES.items()}
        for name, tensor in values(version).items():
            made[name].copy_(tensor)
        return made

    def carry(self, version: int) -> SyncReport:
        """Publish beside the next step, and serve beside a decode step."""
        for publisher in self.publishers:
            publisher.publish(version)
        with contextlib.ExitStack() as steps:
            for number in range(1, 1 + len(self.publishers) + len(self.replicas)):
                steps.enter_context(self.world.training(number))
            for publisher in self.publishers:
                publisher.fence()
            return asyncio.run(self.coordinator.sync(version))

    def train(self, version: int, every: int = 1) -> None:
        """An optimizer step, which changes every so-manieth element, on each trainer's default stream."""
        new = values(version)
        for live in self.live:
            for name, tensor in live.items():
                tensor.view(-1)[::every].copy_(new[name].view(-1)[::every])

    def agree(self) -> bool:
        expected = {name: tensor.cpu().bfloat16() for name, tensor in self.live[0].items()}
        return all(replica.holds(expected) for replica in self.replicas)

    def close(self) -> None:
        for part in (self.coordinator, *self.publishers, *(replica.subscriber for replica in self.replicas)):
            part.close()


def test_a_bucket_that_is_written_as_it_arrives_is_read_before_the_next_one_overwrites_it(world: World) -> None:
    """The writer copies without waiting, on a stream of its own, and the receiver uses one buffer for all buckets."""
    manifest = Manifest(1, tuple(SPECS.values()), 512)
    runtime = runtime_of(ROLLOUT_DEVICE)
    sent = torch.arange(manifest.total_bytes, dtype=torch.int64).to(torch.uint8)
    live, buffer = (torch.zeros(size, dtype=torch.uint8, device=ROLLOUT_DEVICE) for size in (sent.numel(), 512))
    runtime.synchronize()
    stream = LiveStream(manifest, "rollout-0/0", Deadline.after(HANG_S), lambda: None, runtime)

    def receive() -> None:
        with runtime.on(runtime.stream_for(runtime)):
            for index in range(manifest.bucket_count):
                start, stop = manifest.window(index)
                buffer[: stop - start].copy_(sent[start:stop])
                runtime.synchronize()
                stream.offer(index, buffer[: stop - start])
            stream.finish()

    receiver = threading.Thread(target=receive)
    receiver.start()
    with runtime.on(runtime.stream_for(stream)):
        offsets = {entry.spec.name: entry.offset for entry in manifest.entries}
        for part in stream.parts():
            at = offsets[part.name] + part.start * part.values.itemsize
            live[at : at + part.values.nbytes].copy_(part.values.view(torch.uint8), non_blocking=True)
        runtime.synchronize()
    receiver.join()
    assert not world.violations, names(world.violations)
    found = live.cpu()
    for entry in manifest.entries:
        window = slice(entry.offset, entry.offset + entry.spec.nbytes)
        assert torch.equal(found[window], sent[window])


@pytest.mark.parametrize(("engine", "prepared"), [("shm", False), ("cuda_ipc", True)])
def test_versions_and_deltas_go_from_device_to_device_and_wait_for_what_they_need_and_for_nothing_else(
    engine: str, prepared: bool, world: World, tmp_path: Path
) -> None:
    """With `prepared`, a delta is already on the live weights' device when it is taken."""
    run = Run(world, tmp_path, engine, codec="delta")
    if prepared:
        run.replicas[0].subscriber.prepare_delta = lambda delta: StagedDelta.of(delta).to(ROLLOUT_DEVICE)
    for version in (1, 2, 3):
        run.train(version, every=1 if version == 1 else 50)
        report = run.carry(version)
        assert not world.violations, names(world.violations)
        assert run.agree()
        assert report.codec == ("dense" if version == 1 else "delta")
    run.close()


def test_two_ranks_send_each_byte_once_to_three_replicas(world: World, tmp_path: Path) -> None:
    """Over `nccl`, whose receivers broadcast among themselves what one of them gets."""
    run = Run(world, tmp_path, "nccl", trainers=2, replicas=3)
    run.train(1)
    run.carry(1)
    before = dict(world.sent)
    run.train(2)
    run.carry(2)
    assert not world.violations, names(world.violations)
    assert run.agree()
    run.close()
    payload = sum(spec.nbytes for spec in SPECS.values())
    assert payload <= sum(world.sent[device] - before[device] for device in (1, 2)) < 1.1 * payload


def test_host_memory_from_which_versions_are_loaded_is_known_to_the_live_models_device(
    world: World, registered: dict[int, tuple[int, bool]], tmp_path: Path
) -> None:
    """CUDA is told that a sender's memory is mapped to be read only, until the version is released."""
    run = Run(world, tmp_path, "shm")
    run.train(1)
    loaded: list[torch.Tensor] = []
    run.replicas[0].look = loaded.extend
    run.carry(1)
    spans = [(start, stop, read_only) for start, (stop, read_only) in registered.copy().items()]
    of_them = [
        read_only
        for tensor in loaded
        for start, stop, read_only in spans
        if start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= stop
    ]
    assert of_them == [True] * len(SHAPES)
    loaded.clear()
    run.close()
    del run

    def given_back() -> bool:
        gc.collect()
        return not registered

    wait_until(given_back, "end of the threads of what was closed, and with them of the registration")


def test_a_snapshot_that_does_not_wait_for_the_optimizers_step_is_noticed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceRuntime, "wait_for", lambda *_: None)
    run = Run(world, tmp_path, "cuda_ipc")
    with contextlib.suppress(WeightlaneError):
        run.train(1)
        run.carry(1)
    run.close()
    assert NO_WAIT in world.broken, names(world.violations)
