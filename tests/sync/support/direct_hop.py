"""Trainer ranks and rollout ranks of one process, each with the slices of tensors that a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch
from bits import same
from patience import PATIENT
from waiting import HANG_S

from weightlane.ckpt_engines import CheckpointEngineRegistry, SyncAbortedError
from weightlane.plugins import RunHooks
from weightlane.sync import (
    CommitMode,
    CommitReport,
    Coordinator,
    Expectation,
    ExpectedTensor,
    LiveStream,
    LocalShard,
    Placement,
    Publisher,
    Rendezvous,
    SlicedTensors,
    Subscriber,
    SyncConfig,
    SyncReport,
    TensorSpec,
)
from weightlane.sync.version.box import Box

SHAPES = {"embed": (37, 192), "q": (24, 192), "o": (24, 320), "experts": (6, 8, 130), "norm": (192,), "scale": ()}
SPECS = {name: TensorSpec(name, shape, torch.float32) for name, shape in SHAPES.items()}
Specs = Mapping[str, TensorSpec]
Cut = Callable[[TensorSpec, int, int], list[Box]]


def along(axis: int) -> Cut:
    """Even parts along a dimension, the last ones short or empty; of a scalar, everything on rank 0."""

    def cut(spec: TensorSpec, rank: int, world: int) -> list[Box]:
        if not spec.shape:
            return [Box((), ())] if rank == 0 else []
        at = min(axis, len(spec.shape) - 1)
        chunk = -(-spec.shape[at] // world)
        first, stop = (min(spec.shape[at], number * chunk) for number in (rank, rank + 1))
        whole = Box.whole(spec.shape)
        return [
            Box(
                (*whole.starts[:at], first, *whole.starts[at + 1 :]),
                (*whole.shape[:at], stop - first, *whole.shape[at + 1 :]),
            )
        ]

    return cut


rows, columns = along(0), along(9)


def copies(spec: TensorSpec, rank: int, world: int) -> list[Box]:
    """Everything on every rank, as data-parallel ranks hold it."""
    return [Box.whole(spec.shape)]


def interleaved(spec: TensorSpec, rank: int, world: int) -> list[Box]:
    """Every so manieth row, as fused parameters of tensor-parallel ranks hold them."""
    if not spec.shape:
        return copies(spec, rank, world)
    return [Box((row, *(0 for _ in spec.shape[1:])), (1, *spec.shape[1:])) for row in range(rank, spec.shape[0], world)]


def mesh(spec: TensorSpec, rank: int, world: int) -> list[Box]:
    """Rows of columns: two ranks in each direction."""
    if len(spec.shape) < 2:
        return rows(spec, rank // 2, 2)
    row, column = rows(spec, rank // 2, 2)[0], columns(spec, rank % 2, 2)[0]
    common = row.intersect(column)
    return [common] if common is not None else []


def values(version: int, specs: Specs = SPECS) -> dict[str, torch.Tensor]:
    """The tensors of a version: one element in 96 is new in each."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(spec.shape, generator=generator) for name, spec in specs.items()}
    for tensor in tensors.values():
        tensor.view(-1)[version % 96 :: 96] += version
    return tensors


class Rollout:
    """A rollout rank that is a replica of its own, whose live weights are what it needs of each tensor."""

    def __init__(
        self,
        name: str,
        address: Any,
        engine: str,
        options: dict[str, Any],
        needed: Placement | None,
        commit: CommitMode = "staged",
        specs: Specs = SPECS,
        hooks: RunHooks | None = None,
    ) -> None:
        self.name = name
        self._specs = specs
        self._needed = Placement.whole(specs.values()) if needed is None else needed
        expectation = Expectation(
            {name: ExpectedTensor(spec.shape, frozenset({spec.dtype})) for name, spec in specs.items()}
        )
        self.subscriber = Subscriber(
            f"{self.name}/0", address, engine, options, expectation, needed=needed, commit=commit, hooks=hooks
        )
        first = values(0, specs)
        self.live: dict[tuple[str, Box], torch.Tensor] = {
            (spec.name, box): first[spec.name][box.index].clone() for spec, box in self._needed.slices
        }

    def subscriber_names(self) -> list[str]:
        return [f"{self.name}/0"]

    async def commit(self, version: int) -> CommitReport:
        if (stream := self.subscriber.take_stream(version)) is not None:
            await asyncio.to_thread(self._write, stream)
            return CommitReport(version, blocked_s=0.0)
        tensors = self.subscriber.take(version)
        self.live = {
            (spec.name, box): (tensors.partly(spec.name) if isinstance(tensors, SlicedTensors) else tensors[spec.name])[
                box.index
            ].clone()
            for spec, box in self._needed.slices
        }
        self.subscriber.release(version)
        return CommitReport(version, blocked_s=0.0)

    def _write(self, stream: LiveStream) -> None:
        """Put a version into the live weights piece by piece."""
        live = {name: torch.full(spec.shape, float("nan")) for name, spec in self._specs.items()}
        stream.begin()
        for piece in stream.parts():
            live[piece.name].view(-1)[piece.start : piece.start + piece.values.numel()] = piece.values
        self.live = {(spec.name, box): live[spec.name][box.index].clone() for spec, box in self._needed.slices}

    async def rollback(self, version: int) -> None:
        raise AssertionError(version)

    async def quarantine(self, error: BaseException) -> None:
        raise AssertionError(error)

    def holds(self, wanted: Mapping[str, torch.Tensor]) -> bool:
        """Whether its weights are, bit for bit, what it needs of `wanted`."""
        return all(same(tensor, wanted[name][box.index]) for (name, box), tensor in self.live.items())


class Hop:
    """Trainer ranks that hold what `cut` says, and replicas that need what is said of each; all in this process."""

    def __init__(
        self,
        stack: ExitStack,
        engine: str,
        options: dict[str, Any],
        cut: Cut,
        world: int,
        needs: Sequence[Placement | None],
        commit: CommitMode = "staged",
        specs: Specs = SPECS,
        rollout_specs: Specs | None = None,
        hooks: RunHooks | None = None,
        **more: Any,
    ) -> None:
        rendezvous = Rendezvous.host()
        self._specs = specs
        first = values(0, specs)
        self.shards = [
            [
                LocalShard(spec, box.starts, first[spec.name][box.index].clone())
                for spec in specs.values()
                for box in cut(spec, rank, world)
            ]
            for rank in range(world)
        ]
        placements = [Placement.of_shards(shards) for shards in self.shards]
        self.replicas = [
            Rollout(
                f"rollout-{number}", rendezvous.address, engine, options, needed, commit, rollout_specs or specs, hooks
            )
            for number, needed in enumerate(needs)
        ]
        for replica in self.replicas:
            stack.enter_context(closing(replica.subscriber))
        self.publishers = [
            stack.enter_context(
                closing(
                    Publisher(
                        f"trainer-{rank}",
                        rendezvous.address,
                        shards=shards,
                        placements=placements,
                        rank=rank,
                        engine=CheckpointEngineRegistry().create(engine, options),
                        bucket_bytes=8192,
                        deadline_s=HANG_S,
                        hooks=hooks,
                        **more,
                    )
                )
            )
            for rank, shards in enumerate(self.shards)
        ]
        names = [publisher.name for publisher in self.publishers]
        config = SyncConfig(quorum=1.0, **PATIENT)
        self.coordinator = Coordinator(rendezvous, names, self.replicas, config)
        stack.enter_context(closing(self.coordinator))

    def step(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Pass the fence, and train until the weights are `wanted`."""
        for publisher, shards in zip(self.publishers, self.shards, strict=True):
            publisher.fence()
            for shard in shards:
                shard.data.copy_(wanted[shard.spec.name][shard.box.index])

    def publish(self, version: int) -> None:
        for publisher in self.publishers:
            publisher.publish(version)

    def sync(self, version: int) -> SyncReport:
        return asyncio.run(self.coordinator.sync(version))

    def fails(self, version: int, says: str) -> BaseException | None:
        """Sync `version`, which is aborted with words that `says` matches; returns why."""
        import pytest  # which the processes that import this module for something else do not need

        with pytest.raises(SyncAbortedError, match=says) as caught:
            self.sync(version)
        return caught.value.__cause__

    def serve(self, version: int) -> SyncReport:
        """Train, publish and commit `version`: every replica has, bit for bit, what it needs of it."""
        self.step(values(version, self._specs))
        self.publish(version)
        report = self.sync(version)
        assert self.all_hold(version)
        return report

    def all_hold(self, wanted: int | Mapping[str, torch.Tensor]) -> bool:
        """Whether every replica has, bit for bit, what it needs of these weights, or of those of a version."""
        tensors = values(wanted, self._specs) if isinstance(wanted, int) else wanted
        return all(replica.holds(tensors) for replica in self.replicas)


MakeHop = Callable[..., Hop]
"""The fixture `hop`: `hop(engine, *arguments)` has connected nobody yet; see `Hop`."""


def of_rank(cut: Cut, rank: int, world: int, specs: Specs = SPECS) -> Placement:
    """Return the placement that a tensor-parallel rank needs: its cut of each tensor, and every scalar whole."""
    return Placement.of_boxes(
        (spec, cut(spec, rank, world) if spec.shape else [Box((), ())]) for spec in specs.values()
    )


TP2 = [of_rank(columns, 0, 2), of_rank(columns, 1, 2)]
EVERYTHING = None
LAYOUTS: dict[str, tuple[Cut, int]] = {
    "rows": (rows, 3),
    "columns": (columns, 2),
    "interleaved": (interleaved, 2),
    "a mesh": (mesh, 4),
    "one rank": (rows, 1),
}
