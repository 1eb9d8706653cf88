"""Trainer ranks and rollout ranks of a hop, in processes around a coordinator in the test's own process.

`serve` executes commands from a pipe, each a list of a method's name and its arguments, and answers each.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from direct_hop import rows
from waiting import HANG_S

from weightlane.ckpt_engines import CheckpointEngineRegistry, CommitError, QuarantinedError, WeightlaneError
from weightlane.ckpt_engines.runtime.device_checksum import mixed_sum
from weightlane.plugins import hookimpl
from weightlane.sync import (
    Expectation,
    ExpectedTensor,
    LiveStream,
    LocalShard,
    Publisher,
    StagedDelta,
    Subscriber,
    TensorSpec,
)
from weightlane.sync.send import snapshotter
from weightlane.sync.version.placement import Placement

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (37, 24),
    "layer.q": (24, 24),
    "layer.bias": (24,),
    "layer.empty": (0, 24),
    "scale": (),
    "head": (41, 24),
}


def weights(version: int, dtype: torch.dtype, big_mib: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of a version, the same in every process; with `big_mib` one more, of that size."""
    generator = torch.Generator().manual_seed(version)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    if big_mib:
        tensors["big"] = torch.full(((big_mib << 20) // dtype.itemsize,), float(version), dtype=dtype)
    return tensors


def digest(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """A checksum per tensor."""
    return {name: mixed_sum(tensor.detach().reshape(-1).clone().view(torch.uint8)) for name, tensor in tensors.items()}


_ODD_BITS = (1, -0x8000_0000, 0x7FC0_1234)
"""A denormal, negative zero, and a NaN with a payload."""


def nudge(tensors: dict[str, torch.Tensor], version: int, every: int) -> None:
    """Change one element in `every` of float32 tensors, in place."""
    odd = torch.tensor(_ODD_BITS[version % 3], dtype=torch.int64).to(torch.int32)
    for tensor in tensors.values():
        if tensor.numel():
            tensor.view(-1).view(torch.int32)[version % every :: every] = odd if version % 2 else version


def nudged(first: int, versions: list[int], every: int) -> dict[str, torch.Tensor]:
    """`weights(first)` after `nudge` for each of `versions`."""
    tensors = weights(first, torch.float32)
    for version in versions:
        nudge(tensors, version, every)
    return tensors


class Trainer:
    """A trainer rank whose parameters are row shards of `weights(version)`."""

    def __init__(
        self, name: str, rendezvous: Any, backend: str, options: dict[str, Any], rank: int, world: int, **more: Any
    ) -> None:
        wire = getattr(torch, more.pop("wire_dtype", "float32"))
        self._big_mib = more.pop("big_mib", 0)
        # How long it waits for receivers that look at memory which it needs.
        snapshotter._PATIENCE_S = more.pop("patience_s", snapshotter._PATIENCE_S)
        self._values = weights(0, torch.float32, self._big_mib)
        specs = {key: TensorSpec(key, tuple(full.shape), wire) for key, full in self._values.items()}
        held = [
            [
                LocalShard(specs[key], box.starts, full[box.index].clone())
                for key, full in self._values.items()
                for box in rows(specs[key], other, world)
            ]
            for other in range(world)
        ]
        self._shards = held[rank]
        self.end = Publisher(
            name,
            rendezvous,
            rank=rank,
            placements=[Placement.of_shards(shards) for shards in held],
            shards=held[rank],
            engine=CheckpointEngineRegistry().create(backend, options),
            bucket_bytes=more.pop("bucket_bytes", 1024),
            deadline_s=more.pop("deadline_s", HANG_S),
            **more,
        )

    def step(self, version: int) -> None:
        """Pass the fence, then change the parameters."""
        self.end.fence()
        self._values = weights(version, torch.float32, self._big_mib)
        self._load()

    def nudge(self, version: int, every: int) -> None:
        """Pass the fence, then change one element in `every` of each tensor; see `nudged`."""
        self.end.fence()
        nudge(self._values, version, every)
        self._load()

    def hold_after(self, number: int) -> None:
        """When so many buckets are sent from now on, send no more but those that are under way by then."""
        sent = itertools.count(1)

        class Observer:
            @hookimpl
            def bucket_sent(self) -> None:
                if next(sent) >= number:
                    threading.Event().wait(HANG_S)

        self.end.hooks.register(Observer())

    def _load(self) -> None:
        for shard in self._shards:
            shard.data.copy_(self._values[shard.spec.name][shard.box.index])


class Rollout:
    """A rollout rank whose live weights are a dict."""

    def __init__(self, name: str, rendezvous: Any, backend: str, options: dict[str, Any], **more: Any) -> None:
        self.live = weights(0, torch.float32, more.get("big_mib", 0))
        wire = getattr(torch, more.get("wire_dtype", "float32"))
        shapes = {key: tuple(tensor.shape) for key, tensor in self.live.items()}
        shapes |= {key: tuple(shape) for key, shape in more.get("shapes", {}).items()}
        expectation = Expectation({key: ExpectedTensor(shape, frozenset({wire})) for key, shape in shapes.items()})
        self.end = Subscriber(
            name,
            rendezvous,
            backend,
            options,
            expectation,
            staging_limit_bytes=more.get("staging_limit_bytes", 0),
            commit=more.get("commit", "staged"),
        )
        self._trips_after, self._victim = -1, 0
        if more.get("scatters"):
            self.end.prepare_delta = StagedDelta.of
        self._undo: StagedDelta | None = None

    def commit(self, version: int) -> None:
        """Load the staged version, or write the one that comes."""
        if (stream := self.end.take_stream(version)) is not None:
            self._write(stream)
            return
        self._undo = self.end.take_delta(version)
        if self._undo is not None:
            self._undo.swap(self.live)
            return
        self.live = {name: tensor.clone() for name, tensor in self.end.take(version).items()}
        self.end.release(version)

    def die_at(self, number: int) -> None:
        """Kill this process when so many buckets have come, before the last of them is handed on."""
        came = itertools.count(1)

        class Observer:
            @hookimpl
            def bucket_received(self) -> None:
                if next(came) == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        self.end.hooks.register(Observer())

    def watch_memory(self) -> None:
        """From now on, look how much memory this process takes."""
        from weightlane.cli.bench.processes.peak_memory import PeakMemory

        self._memory = PeakMemory(shared=False)

    def extra_memory(self) -> int:
        """Return by how many bytes peak memory exceeded the memory in use when `watch_memory` was called."""
        return self._memory.stop()

    def trip(self, after: int, victim: int = 0) -> None:
        """From now on, when so many pieces of a version are written in place, kill the process `victim`; without one, fail.

        Never if negative.
        """
        self._trips_after, self._victim = after, victim

    def _write(self, stream: LiveStream) -> None:
        """Overwrite the live weights piece by piece."""
        written = 0
        try:
            stream.begin()
            for piece in stream.parts():
                if written == self._trips_after:
                    if not self._victim:
                        raise CommitError("tripped, on purpose.", part="hop")
                    os.kill(self._victim, signal.SIGKILL)
                live = self.live[piece.name].view(-1)
                live[piece.start : piece.start + piece.values.numel()] = piece.values
                written += 1
        except WeightlaneError as error:
            if not written:
                self.end.restored()
                raise CommitError(f"nothing was written: {error}", part="hop") from error
            raise QuarantinedError(f"a mixture: {error}", part="hop", peer=error.peer) from error

    def rollback(self, version: int) -> None:
        """Load what served before `version`."""
        if self._undo is not None and self._undo.version == version:
            self._undo.swap(self.live)
            self._undo = None
            self.end.restored()
            return
        previous, tensors = self.end.take_previous(version)
        self.live = {name: tensor.clone() for name, tensor in tensors.items()}
        self.end.release(previous)

    def take_only(self, version: int) -> None:
        """Begin a load that does not end."""
        self._taken = self.end.take(version)

    def taken_digest(self) -> dict[str, str]:
        return digest(self._taken)

    def live_digest(self) -> dict[str, str]:
        return digest(self.live)


def serve(pipe: Connection, make: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Make a participant and call its methods until told to close, or until the other end of the pipe is gone.

    What it has no method for is for its `end`, a publisher or a subscriber.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the test decides
    torch.set_num_threads(1)
    participant = make(**arguments)
    pipe.send({"value": "ready"})
    while True:
        try:
            method, *values = pipe.recv()
        except EOFError:
            return
        try:
            call = getattr(participant, method, None) or getattr(participant.end, method)
            answer: dict[str, Any] = {"value": call(*values)}
        except WeightlaneError as error:
            reason = getattr(error, "reason", None)
            answer = {"error": error.to_wire(), "reason": reason.to_wire() if reason else None}
        pipe.send(answer)
        if method == "close":
            return
