"""Fakes of process groups of NCCL and HCCL: operations of one communicator run in order, and meet those of its other ranks."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .streams import ORDER, UNBOUNDED, WRONG_DEVICE, Block, Event, Operation, Stream
from .tensors import CheckedTensor, _range
from .world import World

Place = tuple[Block, int, int]
BOUNDED = "weightlane-bounded-call"
"""Name of the threads of `run_bounded`."""
_fleets: dict[str, Fleet] = {}
_numbers = itertools.count()


@dataclass(eq=False)
class Part:
    """One rank's share of an operation: sends and receives side by side, or a broadcast.

    Attributes:
        rank: The rank.
        needs: What has to meet: (source, target, number among those of the two), or (root, -1, number among broadcasts).
        places: The memory for each of these: block, first byte, and one past the last. Nobody is kept from giving it back.
    """

    rank: int
    needs: list[tuple[int, int, int]]
    places: list[Place]
    met: set[tuple[int, int, int]] = field(default_factory=set)
    begun: bool = False
    operation: Operation | None = None


class Fleet:
    """All members of one communicator.

    Args:
        world: The devices that its members are on.
        size: How many members it has.
    """

    def __init__(self, world: World, size: int) -> None:
        self.world, self.size = world, size
        self.streams: dict[int, Stream] = {}
        self.parts: dict[int, list[Part]] = {}
        """Unfinished parts of each rank, in order."""
        self.let_go = False
        self.connected = False
        """Whether all pairs are taken for connected."""
        self._connecting: set[tuple[int, int, int]] = set()
        """Ranks that make their first transfer with another one: (source, target, rank)."""
        world.idle.append(self._look)

    def join(self, rank: int, device: int) -> None:
        with self.world.changed:
            if any(stream.device == device for stream in self.streams.values()):
                self.world.violate(WRONG_DEVICE, f"two members of a communicator are on device {device}")
            self.streams[rank] = self.world.stream(device, f"communicator of rank {rank}")
            self.parts[rank] = []

    def connect(self, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Wait, as NCCL does on the host, until the other ranks of pairs that have transferred nothing yet are there, too."""
        new = [pair for pair in pairs if not self.connected and (*pair, rank) not in self._connecting]
        if new and threading.current_thread().name != BOUNDED:
            self.world.violate(
                UNBOUNDED, f"the first transfer between ranks {new[0]} was started by a call of rank {rank}"
            )
            return
        with self.world.changed:
            self._connecting |= {(*pair, rank) for pair in new}
            self.world.changed.notify_all()
        there = lambda: all({(*pair, pair[0]), (*pair, pair[1])} <= self._connecting for pair in new)  # noqa: E731
        self.world.wait_until(lambda: self.let_go or self.world.let_go or there(), "the other rank of a pair")

    def start(self, part: Part) -> Operation:
        world, stream = self.world, self.streams[part.rank]
        with world.changed:
            stream.wait_stream(world.current_stream(stream.device))
            self.parts[part.rank].append(part)
            operation = stream.put("transfer", lambda: self._end(part), ready=lambda: self._met(part))
            part.operation = operation
            for need, place in zip(part.needs, part.places, strict=True):
                if place[0].device != stream.device:
                    world.violate(WRONG_DEVICE, f"device {stream.device} transfers memory of {place[0].device}")
                world.access(operation, stream, *place, writes=need[0] != part.rank)
            return operation

    def _end(self, part: Part) -> None:
        self.parts[part.rank].remove(part)

    def _met(self, part: Part) -> bool:
        """Move the bytes of `part` for which the other ranks are ready, too. Returns whether all of them have moved."""
        part.begun = True
        for need in part.needs:
            if need not in part.met:
                self._meet(need)
        return self.let_go or part.met.issuperset(part.needs)

    def _meet(self, need: tuple[int, int, int]) -> None:
        source, target, _ = need
        found = {rank: self._at_head(rank, need) for rank in (range(self.size) if target < 0 else (source, target))}
        if not all(found.values()):
            return
        block, start, stop = self._place(found[source], need)
        for rank, other in found.items():
            assert other is not None
            into, to, end = self._place(other, need)
            if end - to != stop - start:
                self.world.violate(ORDER, f"rank {rank} takes {end - to} bytes of {stop - start}")
            elif rank != source:
                into.bytes(to, end)[:] = block.bytes(start, stop)
            other.met.add(need)

    @staticmethod
    def _place(part: Part | None, need: tuple[int, int, int]) -> Place:
        assert part is not None
        return part.places[part.needs.index(need)]

    def _at_head(self, rank: int, need: tuple[int, int, int]) -> Part | None:
        waiting = self.parts.get(rank, [])
        return waiting[0] if waiting and waiting[0].begun and need in waiting[0].needs else None

    def _look(self) -> None:
        """Called when no stream can run: note a violation where members wait for each other in a circle."""
        heads = {rank: parts[0] for rank, parts in self.parts.items() if parts and parts[0].begun}
        waits = {
            rank: {
                other
                for need in part.needs
                for other in (range(self.size) if need[1] < 0 else need[:2])
                if need not in part.met and other in heads and need not in heads[other].needs
            }
            for rank, part in heads.items()
        }
        for first in waits if not self.let_go else ():
            reached, left = set[int](), [first]
            while left:
                new = waits.get(left.pop(), set()) - reached
                reached |= new
                left += new
            if first in reached:
                self.world.violate(ORDER, f"ranks {sorted(reached)} wait for each other")
                self.let_go = True
                return


class Work:
    """Fake of torch's ``Work``."""

    def __init__(self, fleet: Fleet, rank: int) -> None:
        self._world, self._stream = fleet.world, fleet.streams[rank]
        self._event = Event(fleet.world)
        self._event.record(self._stream)

    def wait(self) -> None:
        """Have the current stream wait for the operation."""
        self._world.current_stream(self._stream.device).wait_event(self._event)

    def is_completed(self) -> bool:
        return bool(self._event.passed)


class Group:
    """One member of a communicator, with the calls of ProcessGroupNCCL."""

    def __init__(self, fleet: Fleet, rank: int, device: int) -> None:
        self._fleet, self._rank = fleet, rank
        self._broadcasts = 0
        self._pairs: Counter[tuple[int, int]] = Counter()
        self._batch: list[tuple[tuple[int, int, int], CheckedTensor]] | None = None
        fleet.join(rank, device)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._fleet.size

    def broadcast(self, tensors: list[CheckedTensor], options: Any) -> Work:
        self._broadcasts += 1
        return self._go([((options.rootRank, -1, self._broadcasts), tensors[0])])

    def send(self, tensors: list[CheckedTensor], target: int, _tag: int) -> None:
        """Add a send to the open batch; torch's, outside of one, would open another communicator."""
        self._add((self._rank, target), tensors[0])

    def recv(self, tensors: list[CheckedTensor], source: int, _tag: int) -> None:
        self._add((source, self._rank), tensors[0])

    def _add(self, pair: tuple[int, int], tensor: CheckedTensor) -> None:
        assert self._batch is not None, "outside of a batch it would open a communicator of two"
        self._pairs[pair] += 1
        self._batch.append(((*pair, self._pairs[pair]), tensor))

    def _start_coalescing(self) -> None:
        self._batch = []

    def _end_coalescing(self) -> Work:
        batch, self._batch = self._batch, None
        assert batch
        return self._go(batch)

    def _go(self, needs: Sequence[tuple[tuple[int, int, int], CheckedTensor]]) -> Work:
        self._fleet.connect(self._rank, [need[:2] for need, _ in needs if need[1] >= 0])
        self._fleet.start(
            Part(self._rank, [need for need, _ in needs], [(tensor.block, *_range(tensor)) for _, tensor in needs])
        )
        return Work(self._fleet, self._rank)

    def abort(self) -> None:
        with self._fleet.world.changed:
            self._fleet.let_go = True


class HcclGroup(Group):
    """Member with the calls of torch_npu's ProcessGroupHCCL, which has no coalescing."""

    def batch_isend_irecv(self, kinds: list[str], tensors: list[CheckedTensor], ranks: list[int]) -> Work:
        self._batch = []
        for kind, tensor, rank in zip(kinds, tensors, ranks, strict=True):
            self._add((self._rank, rank) if kind == "isend" else (rank, self._rank), tensor)
        batch, self._batch = self._batch, None
        return self._go(batch)

    def abort_hccl_comm(self, _why: str) -> None:
        self.abort()


def open_group(world: World, store: Any, rank: int, size: int, device: int, *, backend: str) -> Group:
    if rank == 0:
        key = f"fleet-{next(_numbers)}"
        _fleets[key] = Fleet(world, size)
        store.set("fleet", key)
    store.wait(["fleet"])
    fleet = _fleets[store.get("fleet").decode()]
    return (HcclGroup if backend == "hccl" else Group)(fleet, rank, device)
