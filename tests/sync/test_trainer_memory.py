"""What publishing takes of a trainer rank's memory, by a record of every allocation."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import memray
import pytest
import torch
from traced_trainer import BUCKET_BYTES, SPECS, WORLD, held, serve

from weightlane.sync import (
    CommitReport,
    Coordinator,
    Expectation,
    ExpectedTensor,
    Placement,
    Rendezvous,
    Subscriber,
    SyncConfig,
)

_PROCESSES = multiprocessing.get_context("forkserver")
_ANSWER_S = 60.0
_MIB = 1 << 20
PYTHON_BYTES = 3 * _MIB
"""What objects, modules that are imported late and libraries take beside tensors."""


class Replica:
    """A replica of one rank that needs `needed`, and looks at what comes."""

    def __init__(
        self, name: str, rendezvous: Rendezvous, engine: str, options: dict[str, Any], needed: Placement | None
    ) -> None:
        self.name, self._needed = name, needed
        expected = {spec.name: ExpectedTensor(spec.shape, frozenset({spec.dtype})) for spec in SPECS}
        self.subscriber = Subscriber(
            f"{name}/0", rendezvous.address, engine, options, Expectation(expected), needed=needed
        )

    def subscriber_names(self) -> list[str]:
        return [f"{self.name}/0"]

    async def commit(self, version: int) -> CommitReport:
        tensors: Any = self.subscriber.take(version)
        for spec, box in (Placement.whole(SPECS) if self._needed is None else self._needed).slices:
            taken = tensors[spec.name] if isinstance(tensors, dict) else tensors.partly(spec.name)  # a store gives all
            assert torch.equal(taken[box.index], torch.full(box.shape, float(version)))
        del tensors
        self.subscriber.release(version)
        return CommitReport(version, 0.0)

    async def rollback(self, version: int) -> None:
        raise AssertionError(version)

    async def quarantine(self, error: BaseException) -> None:
        raise error


def answer(pipe: Connection) -> Any:
    assert pipe.poll(_ANSWER_S), "a trainer rank does not answer"
    return pipe.recv()


@pytest.fixture
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Path]]:
    """Of each trainer rank, after it has published three versions."""
    engine, cut = request.param
    options = {"path": str(tmp_path / "versions")} if engine == "filesystem" else {}
    rendezvous = Rendezvous.host()
    files, pipes, processes = [], [], []
    for rank in range(WORLD):
        files.append(tmp_path / f"trainer-{rank}.bin")
        ours, theirs = _PROCESSES.Pipe()
        arguments = (theirs, rendezvous.address.to_plain(), engine, options, cut, rank, files[-1])
        process = _PROCESSES.Process(target=serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    half = Placement.of(held("columns", 0))
    needs = enumerate((None, half))
    replicas = [Replica(f"rollout-{number}", rendezvous, engine, options, needed) for number, needed in needs]
    config = SyncConfig(deadline_s=_ANSWER_S, quorum=1.0)
    try:
        with closing(Coordinator(rendezvous, [f"trainer-{rank}" for rank in range(WORLD)], replicas, config)) as run:
            for pipe in pipes:
                assert answer(pipe) == "ready"
            for version in (1, 2, 3):
                for pipe in pipes:
                    pipe.send(version)
                asyncio.run(run.sync(version))
                for pipe in pipes:
                    assert answer(pipe) == "published"
        for pipe in pipes:
            pipe.send(None)
            assert answer(pipe) == "recorded"
        yield files
    finally:
        for replica in replicas:
            replica.subscriber.close()
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    "records",
    [*itertools.product(("gloo", "filesystem"), ("rows", "columns", "interleaved")), ("shm", "columns")],
    indirect=True,
)
def test_a_trainer_rank_takes_its_share_and_two_buckets_and_never_a_whole_tensor(records: list[Path]) -> None:
    share = sum(spec.nbytes for spec in SPECS) // WORLD
    for record in records:
        with memray.FileReader(record) as reader:
            peak = reader.metadata.peak_memory
            largest = max(each.size for each in reader.get_allocation_records())
        assert share <= peak <= share + 2 * BUCKET_BYTES + PYTHON_BYTES
        assert largest <= share + 4096, "that much at once is more than what a rank holds"
