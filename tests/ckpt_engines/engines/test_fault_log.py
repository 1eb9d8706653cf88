"""Injected faults can be repeated, and every one is counted in a log."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from sessions import send, soon
from waiting import HANG_S

from weightlane.ckpt_engines import Bucket, CheckpointEngineRegistry, ProtocolError, StorageError, Topology
from weightlane.ckpt_engines.engines.faulty.fault_config import FaultKind
from weightlane.ckpt_engines.engines.faulty.fault_log import FaultRecord, read_fault_log
from weightlane.ckpt_engines.links.sender_link import make_sender_link
from weightlane.ckpt_engines.runtime.devices import HOST


def send_much(path: Path, half: str = "s", **options: Any) -> list[FaultRecord]:
    """Faults of 40 versions of 5 buckets, of which one is empty; a store needs no receiver."""
    log = path / f"log-{len(list(path.iterdir()))}"
    options = {"delay_s": 0, "log": str(log), "inner": {"path": str(path / "store")}, **options}
    sender = make_sender_link(CheckpointEngineRegistry().create("faulty:filesystem", options), half, HOST)
    sender.connect(Topology("session", {half: sender.address()}, {}), soon())
    for version, index in itertools.product(range(40), range(5)):
        send(sender, Bucket(version, index, torch.zeros(0 if index == 1 else 4, dtype=torch.uint8)), [])
    sender.close()
    return read_fault_log(log)


HARMLESS = ["delay", "flip", "truncate", "duplicate", "drop"]


def test_the_same_seed_injects_the_same_faults_and_another_seed_or_name_others(tmp_path: Path) -> None:
    def faults(**options: Any) -> list[tuple[int, int, FaultKind]]:
        records = send_much(tmp_path, kinds=HARMLESS, **options)
        return [(record.version, record.index, record.kind) for record in records]

    first = faults(seed=1, rate=0.1)
    assert first == faults(seed=1, rate=0.1)
    assert first != faults(seed=2, rate=0.1)
    assert first != faults(seed=1, rate=0.1, half="other")
    assert {kind for _, _, kind in first} == {FaultKind(kind) for kind in HARMLESS}
    assert faults(rate=0) == []


def test_a_version_meets_at_most_one_fault_of_a_half_and_one_that_needs_bytes_spares_empty_buckets(
    tmp_path: Path,
) -> None:
    records = send_much(tmp_path, kinds=HARMLESS, rate=1)
    assert [record.version for record in records] == list(range(40))
    assert {record.index for record in records} == {0}
    records = send_much(tmp_path, kinds=HARMLESS, rate=0.3)
    versions = [record.version for record in records]
    assert len(set(versions)) == len(versions)
    # Five chances of 0.3 each make 0.83 of a version, 33 of 40 on average; the seed decides.
    assert 25 <= len(versions) <= 39
    assert not [record for record in records if record.index == 1 and record.kind in {"flip", "truncate"}]


def test_lines_of_several_writers_never_mix(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = {"kinds": ["drop"], "rate": 1, "log": str(log), "inner": {"path": str(tmp_path / "store")}}
    engine = CheckpointEngineRegistry().create("faulty:filesystem", options)
    started = threading.Barrier(4)

    def send_versions(half: str) -> None:
        sender = make_sender_link(engine, half, HOST)
        sender.connect(Topology("session", {half: sender.address()}, {}), soon())
        started.wait(HANG_S)
        for version in range(30):
            send(sender, Bucket(version, 0, torch.zeros(1, dtype=torch.uint8)), [])
        sender.close()

    halves = [f"half-{number}-{'x' * 200}" for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(send_versions, halves))
    counted = [record.half for record in read_fault_log(log)]
    assert {half: counted.count(half) for half in halves} == dict.fromkeys(halves, 30)
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_log_that_is_missing_is_empty_and_one_that_is_none_is_refused(tmp_path: Path) -> None:
    assert read_fault_log(tmp_path / "missing") == []
    (tmp_path / "log").write_text('{"at": 1}\n')
    with pytest.raises(ProtocolError, match="not a fault log"):
        read_fault_log(tmp_path / "log")
    with pytest.raises(StorageError):
        read_fault_log(tmp_path)
