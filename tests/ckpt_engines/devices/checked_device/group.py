"""Fakes of process groups of NCCL and HCCL: operations of one communicator run in order, and meet those of its other ranks."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .streams import ORDER, UNBOUNDED, WRONG_DEVICE, Block, Event, Stream
from .tensors import CheckedTensor, _range
from .world import World

Place = tuple[Block, int, int]
Need = tuple[int, int, int]
BOUNDED = "weightlane-bounded-call"
"""Name of the threads of `run_bounded`."""
_fleets: dict[str, Fleet] = {}
_numbers = itertools.count()


@dataclass(eq=False)
class Part:
    """One rank's share of an operation: sends and receives side by side, or a broadcast.

    Attributes:
        fleet: The communicator.
        rank: The rank.
        places: The memory for each need: block, first byte, and one past the last. Nobody is kept from giving it back. A need is
            what has to meet: (source, target, number among those of the two), or (root, -1, number among broadcasts).
        unmet: The needs whose bytes have not moved yet.
    """

    fleet: Fleet
    rank: int
    places: dict[Need, Place]
    unmet: set[Need]

    @property
    def over(self) -> bool:
        return not self.unmet or self.fleet.let_go


class Fleet:
    """All members of one communicator.

    Args:
        world: The devices that its members are on.
        size: How many members it has.
    """

    def __init__(self, world: World, size: int) -> None:
        self.world, self.size = world, size
        self.streams: dict[int, Stream] = {}
        self.parts: dict[int, deque[Part]] = {}
        """Unfinished parts of each rank, in order."""
        self.let_go = False
        self.connected: set[tuple[int, int, int]] = set()
        """Ranks that have made their first transfer with another one: (source, target, rank)."""

    def join(self, rank: int, device: int) -> None:
        with self.world.changed:
            if any(stream.device == device for stream in self.streams.values()):
                self.world.violate(WRONG_DEVICE, f"two members of a communicator are on device {device}")
            self.streams[rank] = self.world.stream(device, f"communicator of rank {rank}")
            self.parts[rank] = deque()

    def start(self, rank: int, places: dict[Need, Place]) -> None:
        world, stream = self.world, self.streams[rank]
        with world.changed:
            new = {(*need[:2], rank) for need in places if need[1] >= 0} - self.connected
            if new and threading.current_thread().name != BOUNDED:  # NCCL waits for the other rank, on the host
                world.violate(UNBOUNDED, f"the first transfers {new} were started by a call of rank {rank}")
            self.connected |= new
            stream.wait_stream(world.current_stream(stream.device))
            part = Part(self, rank, places, set(places))
            self.parts[rank].append(part)
            stream.transfers.add(part)
            operation = stream.put("transfer")
            for need, place in places.items():
                if place[0].device != stream.device:
                    world.violate(WRONG_DEVICE, f"device {stream.device} transfers memory of {place[0].device}")
                world.access(operation, *place, writes=need[0] != rank)
            self._move()

    def _move(self) -> None:
        """Move the bytes of everything that all its ranks have begun, and look for members that wait in a circle."""
        while any(self._meet(need) for part in self._heads().values() for need in tuple(part.unmet)):
            pass
        self._look_for_circles()
        self.world.changed.notify_all()

    def _heads(self) -> dict[int, Part]:
        """The parts that run."""
        return {rank: parts[0] for rank, parts in self.parts.items() if parts}

    def _meet(self, need: Need) -> bool:
        """Move the bytes of `need` if every rank that takes part in it is there."""
        heads, (source, target, _) = self._heads(), need
        ranks = range(self.size) if target < 0 else (source, target)
        if not all(rank in heads and need in heads[rank].unmet for rank in ranks):
            return False
        block, start, stop = heads[source].places[need]
        for rank in ranks:
            into, to, end = heads[rank].places[need]
            if end - to != stop - start:
                self.world.violate(ORDER, f"rank {rank} takes {end - to} bytes of {stop - start}")
            elif rank != source:
                into.bytes(to, end)[:] = block.bytes(start, stop)
            heads[rank].unmet.discard(need)
            if not heads[rank].unmet:
                self.parts[rank].popleft()
        return True

    def _look_for_circles(self) -> None:
        heads = self._heads()
        waits = {
            rank: {
                other
                for need in part.unmet
                for other in (range(self.size) if need[1] < 0 else need[:2])
                if other in heads and need not in heads[other].places
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
        return self._event.passed


class Group:
    """One member of a communicator, with the calls of ProcessGroupNCCL."""

    def __init__(self, fleet: Fleet, rank: int, device: int) -> None:
        self._fleet, self._rank = fleet, rank
        self._broadcasts = 0
        self._pairs: Counter[tuple[int, int]] = Counter()
        self._batch: list[tuple[Need, CheckedTensor]] | None = None
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

    def _go(self, needs: Sequence[tuple[Need, CheckedTensor]]) -> Work:
        self._fleet.start(self._rank, {need: (tensor.block, *_range(tensor)) for need, tensor in needs})
        return Work(self._fleet, self._rank)

    def abort(self) -> None:
        with self._fleet.world.changed:
            self._fleet.let_go = True
            self._fleet.world.changed.notify_all()


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
