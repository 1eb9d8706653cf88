"""What publishing takes of a trainer rank's memory, by a record of every allocation."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import memray
import pytest
import torch
from direct_hop import Rollout
from patience import PATIENT
from traced_trainer import BUCKET_BYTES, SPECS, WORLD, held, serve
from waiting import HANG_S

from weightlane.sync import Coordinator, Placement, Rendezvous, SyncConfig

_PROCESSES = multiprocessing.get_context("forkserver")
_MIB = 1 << 20
PYTHON_BYTES = 3 * _MIB
"""What objects, modules that are imported late and libraries take beside tensors."""


def answer(pipe: Connection) -> Any:
    assert pipe.poll(HANG_S), "a trainer rank does not answer"
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
    specs = {spec.name: spec for spec in SPECS}
    replicas = [
        Rollout(number, rendezvous.address, engine, options, needed, specs=specs)
        for number, needed in enumerate((None, Placement.of(held("columns", 0))))
    ]
    config = SyncConfig(quorum=1.0, **PATIENT)
    try:
        with closing(Coordinator(rendezvous, [f"trainer-{rank}" for rank in range(WORLD)], replicas, config)) as run:
            for pipe in pipes:
                assert answer(pipe) == "ready"
            for version in (1, 2, 3):
                for pipe in pipes:
                    pipe.send(version)
                asyncio.run(run.sync(version))
                published = {name: torch.full(spec.shape, float(version)) for name, spec in specs.items()}
                assert all(replica.holds_tensors(published) for replica in replicas)
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
    [
        ("gloo", "rows"),
        ("filesystem", "interleaved"),
        ("shm", "columns"),
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in (
                ("gloo", "columns"),
                ("gloo", "interleaved"),
                ("filesystem", "rows"),
                ("filesystem", "columns"),
            )
        ),
    ],
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
