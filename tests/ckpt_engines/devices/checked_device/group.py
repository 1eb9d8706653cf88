"""Fakes of process groups of NCCL and HCCL: operations of a communicator, or a stream, run in order, and meet other ranks'."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
        behind: What its stream and its hardware queue wait for first, of whatever communicator.
        unmet: The needs whose bytes have not moved yet.
    """

    fleet: Fleet
    rank: int
    places: dict[Need, Place]
    behind: set[Part]
    unmet: set[Need]

    @property
    def over(self) -> bool:
        return not self.unmet or self.rank in self.fleet.let_go

    @property
    def runs(self) -> bool:
        first = self.fleet.parts[self.rank][0]
        return self is first and not self.over and all(part.over for part in self.behind)

    def waits_for(self) -> set[Part]:
        """The parts that must end before this one can."""
        if not self.runs:
            queue = self.fleet.parts[self.rank]
            return {part for part in self.behind if not part.over} | set(itertools.islice(queue, queue.index(self)))
        found = set()
        for need in self.unmet:
            for rank in self.fleet.ranks_of(need):
                queue = self.fleet.parts.get(rank, deque())
                found |= set(itertools.takewhile(lambda part, need=need: need not in part.places, queue))
                found |= {part for part in queue if need in part.places and not part.runs}
        return found


class Fleet:
    """All members of one communicator.

    Args:
        world: The devices that its members are on.
        size: How many members it has.
    """

    def __init__(self, world: World, size: int) -> None:
        self.world, self.size = world, size
        world.fleets.append(self)
        self.streams: dict[int, Stream] = {}
        self.parts: dict[int, deque[Part]] = {}
        """Unfinished parts of each rank, in order."""
        self.let_go: set[int] = set()
        """Ranks that have aborted it; all of them once some wait in a circle."""
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
            behind = {each for each in stream.transfers if isinstance(each, Part)} | self._queued(stream)
            part = Part(self, rank, places, behind, set(places))
            self.parts[rank].append(part)
            stream.transfers.add(part)
            operation = stream.put("transfer")
            for need, place in places.items():
                if place[0].device != stream.device:
                    world.violate(WRONG_DEVICE, f"device {stream.device} transfers memory of {place[0].device}")
                world.access(operation, *place, writes=need[0] != rank)
            _move(world)

    def _queued(self, stream: Stream) -> set[Part]:
        """Return the unfinished transfers of all communicators that are on the hardware queue of `stream`."""
        place = stream.device, stream.queue
        return {
            part
            for fleet in self.world.fleets
            for rank, other in fleet.streams.items()
            if (other.device, other.queue) == place
            for part in fleet.parts[rank]
            if not part.over
        }

    def ranks_of(self, need: Need) -> Sequence[int]:
        return range(self.size) if need[1] < 0 else need[:2]

    def meet(self, need: Need) -> bool:
        """Move the bytes of `need` if every rank that takes part in it is there."""
        heads = {rank: parts[0] for rank, parts in self.parts.items() if parts and parts[0].runs}
        source, ranks = need[0], self.ranks_of(need)
        if not all(rank in heads and need in heads[rank].unmet for rank in ranks):
            return False
        block, start, stop = heads[source].places[need]
        self.world.sent[self.streams[source].device] += stop - start
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


def _move(world: World) -> None:
    """Move the bytes of everything that all its ranks have begun, and look for members that wait in a circle."""

    def parts() -> list[Part]:
        return [part for fleet in world.fleets for queue in fleet.parts.values() for part in queue if not part.over]

    while any(part.fleet.meet(need) for part in parts() if part.runs for need in tuple(part.unmet)):
        pass
    waits = {part: part.waits_for() for part in parts()}
    for first in waits:
        reached, left = set[Part](), [first]
        while left:
            new = waits.get(left.pop(), set()) - reached
            reached |= new
            left += new
        if first in reached:
            on = sorted({part.fleet.streams[part.rank].device for part in reached})
            world.violate(ORDER, f"transfers on the devices {on} wait for each other")
            for part in reached:
                part.fleet.let_go |= part.fleet.parts.keys()
            break
    world.changed.notify_all()


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
            self._fleet.let_go.add(self._rank)
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


def opens_groups(world: World) -> Callable[..., Group]:
    """Fake of `open_process_group`."""

    def open_group(backend: str, store: Any, rank: int, size: int, *_: Any, device: torch.device, **__: Any) -> Group:
        if world.current_device != device.index:
            world.violate(WRONG_DEVICE, f"a communicator of {device} is opened while another device is current")
        if rank == 0:
            key = f"fleet-{next(_numbers)}"
            _fleets[key] = Fleet(world, size)
            store.set("fleet", key)
        store.wait(["fleet"])
        fleet = _fleets[store.get("fleet").decode()]
        return (HcclGroup if backend == "hccl" else Group)(fleet, rank, device.index)

    return open_group
