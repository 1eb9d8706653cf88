"""A publishing trainer rank takes no tensor memory beyond its share and two buckets, by a record of every allocation."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import memray
import pytest
import torch
from hop import Replica, Rollout
from patience import PATIENT
from slices import columns, of_rank
from traced_trainer import BUCKET_BYTES, SPECS, WORLD, TracedTrainer

from weightlane.ckpt_engines import StorageError
from weightlane.sync import Coordinator, Rendezvous, SyncConfig
from weightlane.sync.send.sending_rank import SendMemory

PYTHON_BYTES = 4 << 20
"""Allowance for Python objects, modules that are imported late and libraries, beside the memory of tensors."""


def test_memory_that_could_not_grow_grows_when_there_is_room_again() -> None:
    engine, full = Mock(), StorageError("no room.", part="engine")
    engine.allocate.side_effect = [torch.empty(0, dtype=torch.uint8), full, full, torch.empty(125, dtype=torch.uint8)]
    memory = SendMemory(engine, 0, torch.device("cpu"))
    with pytest.raises(StorageError):
        memory.grow(100)
    assert memory.grow(100).numel() == 125


def test_a_trainer_rank_takes_its_share_and_two_buckets_and_never_a_whole_tensor(
    tmp_path: Path, rendezvous: Rendezvous, start: Any
) -> None:
    records = [tmp_path / f"trainer-{rank}.bin" for rank in range(WORLD)]
    names = [f"trainer-{rank}" for rank in range(WORLD)]
    with ExitStack() as stack:
        given = {"rendezvous": rendezvous.address.to_plain(), "backend": "gloo", "options": {}}
        trainers = [
            start(TracedTrainer, name=name, rank=rank, world=WORLD, record=record, **given)
            for rank, (name, record) in enumerate(zip(names, records, strict=True))
        ]
        rollouts = [
            Rollout(f"rollout-{number}/0", rendezvous.address, "gloo", {}, needed, SPECS)
            for number, needed in enumerate((None, of_rank(columns, 0, WORLD, SPECS)))
        ]
        for rollout in rollouts:
            stack.enter_context(closing(rollout.end))
        replicas = [Replica(f"rollout-{number}", {one.name: one}) for number, one in enumerate(rollouts)]
        coordinator = Coordinator(rendezvous, names, replicas, SyncConfig(quorum=1.0, **PATIENT))
        stack.enter_context(closing(coordinator))
        for trainer in trainers:
            trainer.is_ready()
        for version in (1, 2):
            for trainer in trainers:
                trainer.tell("publish", version)
            asyncio.run(coordinator.sync(version))
            published = {name: torch.full(spec.shape, float(version)) for name, spec in SPECS.items()}
            assert all(rollout.holds(published) for rollout in rollouts)
            for trainer in trainers:
                trainer.answer()
        for trainer in trainers:
            trainer.call("close")
    share = sum(spec.nbytes for spec in SPECS.values()) // WORLD
    for record in records:
        with memray.FileReader(record) as reader:
            peak = reader.metadata.peak_memory
            largest = max(each.size for each in reader.get_allocation_records())
        assert share <= peak <= share + 2 * BUCKET_BYTES + PYTHON_BYTES
        assert largest <= share + 4096, "that much at once is more than what a rank holds"
