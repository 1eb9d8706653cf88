"""The processes of `benchmarks.direct`: trainer ranks and rollout ranks, each able to carry the weights in both ways.

`serve` obeys lists of a method's name and its arguments that come through a pipe, and answers each.
"""

from __future__ import annotations

import re
import signal
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from weightlane.ckpt_engines import CheckpointEngineRegistry
from weightlane.cli.bench.processes.peak_memory import PeakMemory
from weightlane.cli.bench.workload.workload import Workload
from weightlane.sync import Expectation, ExpectedTensor, LocalShard, Placement, Publisher, Subscriber, TensorSpec
from weightlane.sync.version.box import Box
from weightlane.sync.version.sliced_tensors import SlicedTensors

ENGINE = "gloo"
TRAINERS, ROLLOUTS = 2, 2
_BY_ROWS = re.compile(r"(q_proj|k_proj|v_proj|gate_proj|up_proj|embed_tokens|lm_head)\.")
_BY_COLUMNS = re.compile(r"(o_proj|down_proj)\.")
_ALIGNMENT = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TIMEOUT = timedelta(seconds=120)


def rows_of(spec: TensorSpec, rank: int) -> Box:
    """Return the slice of a tensor that a trainer rank holds: rows, as FSDP2 shards them."""
    return _part(spec.shape, 0, -(-spec.shape[0] // TRAINERS), rank)


def needed_by(spec: TensorSpec, rank: int) -> Box:
    """Return the slice of a tensor that a tensor-parallel rollout rank needs: rows, columns, or the whole tensor."""
    if _BY_ROWS.search(spec.name):
        return _part(spec.shape, 0, -(-spec.shape[0] // ROLLOUTS), rank)
    if _BY_COLUMNS.search(spec.name):
        return _part(spec.shape, 1, -(-spec.shape[1] // ROLLOUTS), rank)
    return Box.whole(spec.shape)


def _part(shape: tuple[int, ...], axis: int, chunk: int, rank: int) -> Box:
    first, stop = (min(shape[axis], number * chunk) for number in (rank, rank + 1))
    whole = Box.whole(shape)
    return Box(
        (*whole.starts[:axis], first, *whole.starts[axis + 1 :]),
        (*whole.shape[:axis], stop - first, *whole.shape[axis + 1 :]),
    )


def bits(spec: TensorSpec, box: Box, seed: int) -> torch.Tensor:
    """A slice of a tensor in which every element tells, as far as its width goes, where it belongs; as integers."""
    values = torch.full((), seed, dtype=torch.int64)
    for start, length, size in zip(box.starts, box.shape, spec.shape, strict=True):
        values = values.unsqueeze(-1) * size + torch.arange(start, start + length)
    return (values * 2654435761 >> 7).to(_INTEGERS[spec.dtype.itemsize])


class Rank(ABC):
    """One process; `tensors` is what it holds of each tensor of the model, as `boxes` says."""

    def __init__(self, specs: Sequence[TensorSpec], cut: Callable[[TensorSpec, int], Box], rank: int) -> None:
        self.specs, self.rank = specs, rank
        self.boxes = [cut(spec, rank) for spec in specs]
        self.tensors = [torch.zeros(box.shape, dtype=spec.dtype) for spec, box in zip(specs, self.boxes, strict=True)]
        self._memory: PeakMemory | None = None

    def watch_memory(self) -> None:
        """From now on, look how much memory this process takes."""
        self._memory = PeakMemory(shared=True)

    def extra_memory(self) -> int:
        """Stop the watch; return by how many bytes this process's memory peaked above its value at the start."""
        assert self._memory is not None, "watched"
        return self._memory.stop()

    def held_bytes(self) -> int:
        """Return the size in bytes of the weights that this rank holds."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def gathered_open(self, port: int, number: int, bucket_bytes: int) -> None:
        """Join the others in plain process groups."""
        self._gathered = self.gathered(Groups(port, number), Buckets(self.specs, bucket_bytes))

    def gathered_round(self) -> None:
        """Carry the weights by gathering on one rank and broadcasting from there; return when this rank is done."""
        self._gathered()

    def gathered_close(self) -> None:
        """Leave."""
        del self._gathered
        dist.destroy_process_group()

    @abstractmethod
    def gathered(self, groups: Groups, buckets: Buckets) -> Callable[[], None]:
        """This rank's part in a round of the gathered way."""


class Groups:
    """Process groups of a gathered run: all trainer ranks, and rank 0 of them with all rollout ranks."""

    def __init__(self, port: int, number: int) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=number,
            world_size=TRAINERS + ROLLOUTS,
            timeout=_TIMEOUT,
        )
        self.trainers = dist.new_group(list(range(TRAINERS)), timeout=_TIMEOUT)
        self.everybody = dist.new_group([0, *range(TRAINERS, TRAINERS + ROLLOUTS)], timeout=_TIMEOUT)


class Buckets:
    """Whole tensors, one after the other, in buckets of about `bucket_bytes`: none is cut, as in the frameworks' own.

    In a bucket stand the rows of trainer rank 0 of all its tensors, then those of rank 1: what `dist.gather` gives.
    """

    def __init__(self, specs: Sequence[TensorSpec], bucket_bytes: int) -> None:
        self.numbers: list[list[int]] = [[]]
        held = 0
        for number, spec in enumerate(specs):
            if self.numbers[-1] and held + spec.nbytes > bucket_bytes:
                self.numbers.append([])
                held = 0
            self.numbers[-1].append(number)
            held += spec.nbytes
        self.places: list[list[int]] = []
        """For each bucket, the byte offset of every tensor in a rank's part, followed by the part's length."""
        for bucket in self.numbers:
            places = [0]
            for number in bucket:
                longest = rows_of(specs[number], 0).numel * specs[number].dtype.itemsize
                places.append(places[-1] + -(-longest // _ALIGNMENT) * _ALIGNMENT)
            self.places.append(places)
        self.part_bytes = max(places[-1] for places in self.places)

    def memory(self) -> list[torch.Tensor]:
        """Two buckets, of all ranks' parts."""
        return [torch.zeros(TRAINERS * self.part_bytes, dtype=torch.uint8) for _ in range(2)]

    def parts(self, index: int, data: torch.Tensor) -> list[torch.Tensor]:
        """The parts of bucket `index` in `data`, by trainer rank."""
        return list(data[: TRAINERS * self.places[index][-1]].chunk(TRAINERS))

    def slots(
        self, index: int, part: torch.Tensor, specs: Sequence[TensorSpec], rank: int
    ) -> Iterator[tuple[int, Any]]:
        """The tensors of a part of `rank`: number, and view of its rows."""
        for number, place in zip(self.numbers[index], self.places[index], strict=False):
            spec, box = specs[number], rows_of(specs[number], rank)
            rows = part[place : place + box.numel * spec.dtype.itemsize]
            yield number, rows.view(spec.dtype).view(box.shape)


class TrainerRank(Rank):
    """Holds rows of every tensor."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int) -> None:
        super().__init__(specs, rows_of, rank)
        self._publishers: dict[str, Publisher] = {}
        """Open publishers by their `integrity` setting."""
        for number, (spec, box) in enumerate(zip(specs, self.boxes, strict=True)):
            self._integers(number).copy_(bits(spec, box, number))

    def _integers(self, number: int) -> torch.Tensor:
        return self.tensors[number].view(_INTEGERS[self.tensors[number].dtype.itemsize])

    def step(self) -> None:
        """Change every element."""
        for number in range(len(self.tensors)):
            self._integers(number).add_(1)

    def gathered(self, groups: Groups, buckets: Buckets) -> Callable[[], None]:
        """Gather the next bucket while the last one is broadcast."""
        own = torch.zeros(buckets.part_bytes, dtype=torch.uint8)
        memory = buckets.memory() if self.rank == 0 else []

        def carry() -> None:
            sending: list[dist.Work | None] = [None, None]
            for index in range(len(buckets.numbers)):
                part = own[: buckets.places[index][-1]]
                for number, rows in buckets.slots(index, part, self.specs, self.rank):
                    rows.copy_(self.tensors[number])
                if self.rank != 0:
                    dist.gather(part, dst=0, group=groups.trainers)
                    continue
                data = memory[index % 2]
                if (earlier := sending[index % 2]) is not None:
                    earlier.wait()
                parts = buckets.parts(index, data)
                dist.gather(part, parts, dst=0, group=groups.trainers)
                whole = data[: TRAINERS * buckets.places[index][-1]]
                sending[index % 2] = dist.broadcast(whole, 0, group=groups.everybody, async_op=True)
            for last in sending:
                if last is not None:
                    last.wait()

        return carry

    def direct_open(self, address: Any, integrity: str, bucket_bytes: int, deadline_s: float) -> None:
        """Become a publisher."""
        placements = [
            Placement.of_boxes((spec, [rows_of(spec, rank)]) for spec in self.specs) for rank in range(TRAINERS)
        ]
        self._publishers[integrity] = Publisher(
            f"trainer-{self.rank}",
            address,
            rank=self.rank,
            placements=placements,
            shards=[
                LocalShard(spec, box.starts, tensor)
                for spec, box, tensor in zip(self.specs, self.boxes, self.tensors, strict=True)
            ],
            engine=CheckpointEngineRegistry().create(ENGINE, {}),
            bucket_bytes=bucket_bytes,
            deadline_s=deadline_s,
            integrity="full" if integrity == "full" else "off",
        )

    def direct_publish(self, integrity: str, version: int) -> None:
        """Offer the parameters as they are."""
        self._publishers[integrity].publish(version)

    def direct_fence(self, integrity: str) -> float:
        """Wait until they may change; seconds."""
        return self._publishers[integrity].fence()

    def direct_close(self, integrity: str) -> None:
        """Leave."""
        self._publishers.pop(integrity).close()


class RolloutRank(Rank):
    """Holds what a tensor-parallel rank needs of every tensor."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int) -> None:
        super().__init__(specs, needed_by, rank)
        self._at = {spec.name: number for number, spec in enumerate(specs)}
        self._subscribers: dict[str, Subscriber] = {}
        """Open subscribers by the `integrity` setting of their publishers."""

    def wrong(self, steps: int) -> list[str]:
        """Names of the tensors that are not, bit for bit, the trainers' after so many steps."""
        return [
            spec.name
            for number, (spec, box, tensor) in enumerate(zip(self.specs, self.boxes, self.tensors, strict=True))
            if not torch.equal(tensor.view(_INTEGERS[spec.dtype.itemsize]), bits(spec, box, number).add_(steps))
        ]

    def forget(self) -> None:
        """Make every element wrong, so that only what comes can be right."""
        for tensor in self.tensors:
            tensor.view(torch.uint8).zero_()

    def gathered(self, groups: Groups, buckets: Buckets) -> Callable[[], None]:
        """Take the own slices out of each broadcast bucket, while the next one comes."""
        memory = buckets.memory()

        def take(index: int) -> None:
            for rank, part in enumerate(buckets.parts(index, memory[index % 2])):
                for number, rows in buckets.slots(index, part, self.specs, rank):
                    self._put(number, rows_of(self.specs[number], rank), rows)

        def carry() -> None:
            coming: dist.Work | None = None
            for index in range(len(buckets.numbers)):
                whole = memory[index % 2][: TRAINERS * buckets.places[index][-1]]
                work = dist.broadcast(whole, 0, group=groups.everybody, async_op=True)
                if coming is not None:
                    coming.wait()
                    take(index - 1)
                coming = work
            if coming is not None:
                coming.wait()
                take(len(buckets.numbers) - 1)

        return carry

    def _put(self, number: int, box: Box, values: torch.Tensor) -> None:
        """Copy what this rank needs of a slice into its weights."""
        own = self.boxes[number]
        if (common := own.intersect(box)) is not None:
            self.tensors[number][common.within(own).index].copy_(values[common.within(box).index])

    def direct_open(self, address: Any, integrity: str, _bucket_bytes: int, _deadline_s: float) -> None:
        """Become a subscriber."""
        expected = {spec.name: ExpectedTensor(spec.shape, frozenset({spec.dtype})) for spec in self.specs}
        needed = Placement.of_boxes((spec, [box]) for spec, box in zip(self.specs, self.boxes, strict=True))
        self._subscribers[integrity] = Subscriber(
            f"rollout-0/{self.rank}", address, ENGINE, {}, Expectation(expected), needed=needed
        )

    def direct_commit(self, integrity: str, version: int) -> None:
        """Copy a staged version into the weights."""
        tensors = self._subscribers[integrity].take(version)
        assert isinstance(tensors, SlicedTensors), "the engine goes from shard to shard"
        for name, region in tensors.regions.items():
            self._put(self._at[region.spec.name], region.box, tensors.staged[name])
        del tensors
        self._subscribers[integrity].release(version)

    def direct_close(self, integrity: str) -> None:
        """Leave."""
        self._subscribers.pop(integrity).close()


def serve(pipe: Connection, role: str, workload: Mapping[str, Any], rank: int) -> None:
    """Be one rank until the other end of the pipe is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; whoever started us decides
    torch.set_num_threads(1)
    roles: Mapping[str, Callable[[Sequence[TensorSpec], int], Rank]] = {"trainer": TrainerRank, "rollout": RolloutRank}
    participant = roles[role](Workload.from_plain(workload).specs, rank)
    pipe.send(["ready", None])
    while True:
        try:
            method, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(["value", getattr(participant, method)(*arguments)])
        except Exception:  # noqa: BLE001 - whoever asked shows it
            pipe.send(["error", traceback.format_exc()])
