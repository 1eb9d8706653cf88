"""Trainer ranks, rollout ranks and replicas of a hop, in the test's own process or in processes of their own.

`serve` executes commands from a pipe, each a list of a method's name and its arguments, and answers each.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from bits import same
from slices import Cut, Specs, rows
from slices import values as values_of
from waiting import HANG_S

from weightlane.ckpt_engines import CheckpointEngineRegistry, CommitError, QuarantinedError, WeightlaneError
from weightlane.ckpt_engines.runtime.tensor_bytes import mixed_sum
from weightlane.ckpt_engines.runtime.threads import start_call
from weightlane.plugins import RunHooks, hookimpl
from weightlane.sync import (
    CommitMode,
    CommitReport,
    Expectation,
    ExpectedTensor,
    LiveStream,
    LocalShard,
    Placement,
    Publisher,
    SlicedTensors,
    StagedDelta,
    Subscriber,
    SyncConfig,
    TensorSpec,
)
from weightlane.sync.config import MIB
from weightlane.sync.send import publication_queue

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
    """A trainer rank whose parameters are its slices of `specs`; without, row shards of `weights(version)`."""

    def __init__(
        self,
        name: str,
        rendezvous: Any,
        backend: str,
        options: dict[str, Any],
        rank: int,
        world: int,
        cut: Cut = rows,
        specs: Specs | None = None,
        **more: Any,
    ) -> None:
        wire = getattr(torch, more.pop("wire_dtype", "float32"))
        self._big_mib = more.pop("big_mib", 0)
        # How long it waits for receivers that look at memory which it needs.
        publication_queue._PATIENCE_S = more.pop("patience_s", publication_queue._PATIENCE_S)
        self._values = weights(0, torch.float32, self._big_mib) if specs is None else values_of(0, specs)
        specs = specs or {key: TensorSpec(key, tuple(full.shape), wire) for key, full in self._values.items()}
        held = [
            [
                LocalShard(spec, box.starts, self._values[key][box.index].clone())
                for key, spec in specs.items()
                for box in cut(spec, other, world)
            ]
            for other in range(world)
        ]
        self.shards = held[rank]
        self.end = self.make_publisher(
            name,
            rendezvous,
            rank=rank,
            placements=[Placement.of_shards(shards) for shards in held],
            shards=self.shards,
            engine=CheckpointEngineRegistry().create(backend, options),
            hooks=more.pop("hooks", None),
            config=SyncConfig(bucket_mib=more.pop("bucket_bytes", 1024) / MIB, **{"deadline_s": HANG_S, **more}),
        )

    def make_publisher(self, *arguments: Any, **more: Any) -> Publisher:
        return Publisher(*arguments, **more)

    def step(self, version: int) -> None:
        """Pass the fence, then change the parameters."""
        self.train(weights(version, torch.float32, self._big_mib))

    def nudge(self, version: int, every: int) -> None:
        """Pass the fence, then change one element in `every` of each tensor; see `nudged`."""
        nudge(self._values, version, every)
        self.train(self._values)

    def hold_after(self, number: int) -> None:
        """When so many buckets are sent from now on, send no more but those that are under way by then."""
        sent = itertools.count(1)

        class Observer:
            @hookimpl
            def bucket_sent(self) -> None:
                if next(sent) >= number:
                    threading.Event().wait(HANG_S)

        self.end.hooks.register(Observer())

    def train(self, wanted: dict[str, torch.Tensor]) -> None:
        """Pass the fence, then change the parameters to what they are in `wanted`."""
        self.end.fence()
        self._values = wanted
        for shard in self.shards:
            shard.data.copy_(wanted[shard.spec.name][shard.box.index])


class Rollout:
    """A rollout rank whose live weights are a dict; it needs the slices `needed` of `specs`, or everything."""

    def __init__(
        self,
        name: str,
        rendezvous: Any,
        backend: str,
        options: dict[str, Any],
        needed: Placement | None = None,
        specs: Specs | None = None,
        commit: CommitMode = "staged",
        hooks: RunHooks | None = None,
        **more: Any,
    ) -> None:
        self.name = name
        if specs is None:
            wire = getattr(torch, more.get("wire_dtype", "float32"))
            self.live = weights(0, torch.float32, more.get("big_mib", 0))
            shapes = {key: tuple(tensor.shape) for key, tensor in self.live.items()}
            shapes |= {key: tuple(shape) for key, shape in more.get("shapes", {}).items()}
            specs = {key: TensorSpec(key, shape, wire) for key, shape in shapes.items()}
        else:
            self.live = values_of(0, specs)
        self._needed = needed or Placement.whole(specs.values())
        self.end = Subscriber(
            name,
            rendezvous,
            backend,
            options,
            Expectation({key: ExpectedTensor(spec.shape, frozenset({spec.dtype})) for key, spec in specs.items()}),
            needed=needed,
            staging_limit_bytes=more.get("staging_limit_bytes", 0),
            commit=commit,
            hooks=hooks,
        )
        self._trips_after, self._victim = -1, 0
        if more.get("scatters"):
            self.end.prepare_delta = StagedDelta.of
        self._undo: StagedDelta | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method as `Participant.call` does for a rank in a process of its own."""
        return answer(self, method, *arguments)

    def holds(self, wanted: Mapping[str, torch.Tensor]) -> bool:
        """Whether its weights are, bit for bit, what it needs of `wanted`."""
        return all(
            same(self.live[spec.name][box.index], wanted[spec.name][box.index]) for spec, box in self._needed.slices
        )

    def commit(self, version: int) -> None:
        """Load the staged version, or write the one that comes."""
        if (stream := self.end.take_stream(version)) is not None:
            self._write(stream)
            return
        self._undo = self.end.take_delta(version)
        if self._undo is not None:
            self._undo.swap(self.live)
            return
        self._load(self.end.take(version))
        self.end.release(version)

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        whole = tensors.partly if isinstance(tensors, SlicedTensors) else tensors.__getitem__
        self.live = {spec.name: whole(spec.name).clone() for spec in self._needed.specs}

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
        self._load(tensors)
        self.end.release(previous)

    def take_only(self, version: int) -> None:
        """Begin a load that does not end."""
        self._taken = self.end.take(version)

    def taken_digest(self) -> dict[str, str]:
        return digest(self._taken)

    def live_digest(self) -> dict[str, str]:
        return digest(self.live)


class Held:
    """A call that is held up in the middle, until the test lets it go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.begun.set()
        await self.go_on.wait()


class Replica:
    """One replica of `ranks`, each of which is a `Rollout` or the `Participant` that has one."""

    def __init__(self, name: str, ranks: dict[str, Any]) -> None:
        self.name = name
        self.ranks = ranks
        self.method = "commit"
        self.fails_with: WeightlaneError | None = None
        """Error that the next commit raises after the ranks have taken the version, if any."""
        self.refuses_with: WeightlaneError | None = None
        """Error that the next commit raises before it has touched anything, if any."""
        self.quarantined_by: list[WeightlaneError] = []
        self.serves = 0
        """The version last reported as committed here."""
        self._commit_held: Held | None = None

    def holds_commits(self) -> Held:
        """The next commit is held up once this replica has the version."""
        self._commit_held = Held()
        return self._commit_held

    def subscriber_names(self) -> list[str]:
        return list(self.ranks)

    async def commit(self, version: int) -> CommitReport:
        if self.refuses_with is not None:
            refusal, self.refuses_with = self.refuses_with, None
            raise refusal
        # On threads that a program may start while it ends, unlike those of asyncio's executor.
        calls = [
            asyncio.wrap_future(start_call(partial(rank.call, self.method, version))) for rank in self.ranks.values()
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        if errors := [answer for answer in answers if isinstance(answer, BaseException)]:
            raise next((error for error in errors if isinstance(error, QuarantinedError)), errors[0])
        if self._commit_held is not None:
            held, self._commit_held = self._commit_held, None
            await held()
        if self.fails_with is not None:
            failure, self.fails_with = self.fails_with, None
            raise failure
        return CommitReport(version, blocked_s=0.001)

    async def rollback(self, version: int) -> None:
        for rank in self.ranks.values():
            await asyncio.wrap_future(start_call(partial(rank.call, "rollback", version)))

    async def quarantine(self, error: WeightlaneError) -> None:
        self.quarantined_by.append(error)


def answer(participant: Any, method: str, *arguments: Any) -> Any:
    """Call a method of a participant, or else of its `end`, a publisher or a subscriber."""
    return (getattr(participant, method, None) or getattr(participant.end, method))(*arguments)


def serve(pipe: Connection, make: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Make a participant and call its methods until told to close, or until the other end of the pipe is gone."""
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
            said: dict[str, Any] = {"value": answer(participant, method, *values)}
        except WeightlaneError as error:
            reason = getattr(error, "reason", None)
            said = {"error": error.to_wire(), "reason": reason.to_wire() if reason else None}
        pipe.send(said)
        if method == "close":
            return
