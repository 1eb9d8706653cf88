"""The peer benchmark: what it measures, that it notices wrong values, and what it says of a peer that cannot run."""

from __future__ import annotations

import importlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from waiting import HANG_S, NEVER_S, wait_until

HANGS = """
import multiprocessing, os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = multiprocessing.get_context("spawn").Semaphore(0)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
pathlib.Path({path!r} + ".partial").write_text(lock._semlock.name)
os.replace({path!r} + ".partial", {path!r})
time.sleep(3600)
"""


@pytest.fixture
def tmpfs(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the peers' shared memory, which must be empty in the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(peers, "_TMPFS", folder)
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


def module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.peers.{name}")


@pytest.mark.exhaustive
def test_a_peer_is_measured_and_verified_and_nothing_is_left(peers: ModuleType, tmpfs: Path) -> None:
    name = "copy-in-then-out"
    patience = {"quiet_s": 0.0, "turn_s": NEVER_S, "deadline_s": HANG_S, "block_s": HANG_S}
    plan = peers.Plan("tiny", receivers=1, rounds=1, passes=1, repeats=0, **patience)
    said: list[str] = []
    before = module("cpu_guard").descendants(os.getpid())  # other tests' forkserver
    report = peers.run(plan, [name], said.append)
    (row,) = report["rows"]
    assert row["name"] == name
    assert row["verified"], report
    assert row["rounds"] + row["disturbed_rounds"] >= 1
    assert all(row[figure]["median"] > 0 for figure in ("rollout_blocked_s", "latency_s", "trainer_blocked_s"))
    assert len(said) == 1
    assert module("cpu_guard").descendants(os.getpid()) == before
    assert f"| {name} |" in module("table").markdown(report)


def test_a_digest_notices_any_bit_and_any_place_and_every_round_changes_every_element(peers: ModuleType) -> None:
    workload = module("workload")
    tiny = peers.workload_named("tiny")
    sender, receiver = workload.State(tiny, 1), workload.State(tiny, 2, flat=True)
    assert sender.digest() != receiver.digest()
    before = {name: tensor.clone().view(torch.int16) for name, tensor in sender.tensors.items()}
    sender.change(3)
    for name, tensor in sender.tensors.items():
        assert bool((tensor.view(torch.int16) != before[name]).all())
    workload.copy_all(receiver.tensors, sender.tensors)
    assert sender.digest() == receiver.digest()
    norms = [tensor for name, tensor in receiver.tensors.items() if name.endswith("input_layernorm.weight")]
    first, second = (norm.clone() for norm in norms)
    norms[0].copy_(second)
    norms[1].copy_(first)
    assert sender.digest() != receiver.digest()
    norms[0].copy_(first)
    norms[1].copy_(second)
    norms[1].view(torch.int16)[-1] ^= 1
    assert sender.digest() != receiver.digest()


def turn_of(rounds: int, took_s: float = 1.0, *, clean: bool = True) -> list[dict[str, Any]]:
    """A sender's report of one turn: a warm-up and `rounds` rounds, each of `took_s` seconds."""
    times = dict.fromkeys(("trainer_blocked_s", "rollout_blocked_s", "latency_s"), took_s)
    words = [{"round": n, "warm_up": n == 0, "clean": clean, "verified": True, **times} for n in range(rounds + 1)]
    return [{"versions": {}, "setup_s": 0.0}, *words]


def row_of(peers: ModuleType, name: str, seconds: float, limit_s: float) -> dict[str, Any]:
    """A row as one run gives it in which `memcpy-all` took `limit_s`."""
    catalogue = module("catalogue").catalogue()
    both = {"memcpy-all": turn_of(1, limit_s), name: turn_of(1, seconds)}
    tiny = peers.workload_named("tiny")
    report: dict[str, Any] = module("report").report_of(1, 2, tiny, {each: catalogue[each] for each in both}, both)
    return report


def test_rows_of_two_runs_compare_by_what_they_are_of_their_own_runs_limit(peers: ModuleType) -> None:
    report = module("report")
    order = list(module("catalogue").catalogue())
    peer, slow_peer = row_of(peers, "nixl", 4.0, 2.0), row_of(peers, "ray-object-store", 3.0, 1.0)
    ours = row_of(peers, "weightlane-shm-unchecked", 1.0, 1.0)
    whole = report.merged(report.merged(peer, slow_peer, order), ours, order)
    assert [row["name"] for row in whole["rows"]] == [
        "memcpy-all",
        "weightlane-shm-unchecked",
        "nixl",
        "ray-object-store",
    ]
    assert report.fastest_peers(whole)["memory"]["name"] == "nixl"
    assert "| 1.0 | 0.50 (nixl) |" in module("table").markdown(whole)
    again = row_of(peers, "nixl", 9.0, 1.0)
    assert report.fastest_peers(report.merged(whole, again, order))["memory"]["name"] == "ray-object-store"
    with pytest.raises(ValueError, match="another workload"):
        report.merged({**peer, "workload": {}}, ours, order)


def test_a_turn_that_others_disturbed_or_that_failed_is_repeated_and_the_row_says_so(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = peers.Plan("tiny", receivers=1, rounds=4, passes=2, repeats=1)
    turns: list[tuple[str, int]] = []

    def turn(_plan: object, _workload: object, peer: Any, rounds: int, _lock: object) -> list[dict[str, Any]]:
        turns.append((peer.name, rounds))
        if len(turns) == 1:
            return [{"failed": "no word from the sender within 60 s"}]
        return turn_of(rounds, clean=peer.name == "memcpy" or len(turns) == 6)

    monkeypatch.setattr(peers, "_block", turn)
    report = peers.run(plan, ["memcpy", "gloo-flat"], lambda line: None)
    disturbed = [("gloo-flat", 2), ("gloo-flat", 2), ("memcpy", 2), ("gloo-flat", 4)]
    assert turns == [("memcpy", 2), ("memcpy", 2), *disturbed]
    row = report["rows"][1]
    assert (row["rounds"], row["disturbed_rounds"], row["clean"]) == (4, 4, True)
    assert "a turn failed and was repeated: no word from the sender" in module("table").markdown(report)


def test_a_peer_that_cannot_run_says_what_is_missing_and_how_to_get_it(peers: ModuleType) -> None:
    reason = module("peer").Needs(("no_such_module_at_all",), "pip install it").missing()
    assert reason is not None
    assert "no_such_module_at_all" in reason
    assert reason.endswith("pip install it")
    row = module("report")._row(module("catalogue").catalogue()["nixl"], [{"unavailable": reason}])
    report = {
        "workload": {"name": "tiny", "payload_bytes": 1, "tensors": 1, "receivers": 1},
        "machine": module("report").machine(),
        "date": "2026-01-01",
        "rows": [row],
    }
    assert "cannot run here: no_such_module_at_all" in module("table").markdown(report)


def test_a_peer_that_hangs_is_ended_with_all_its_processes(
    peers: ModuleType, tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "semaphore"

    class Measured(subprocess.Popen[str]):
        """Its time begins when it hangs, however long it took to come so far."""

        def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:  # noqa: A002
            wait_until(ready.exists, "peer that hangs")
            return super().communicate(input, timeout)

    monkeypatch.setattr(peers, "_MEASURE", HANGS.format(path=str(ready)))
    monkeypatch.setattr(peers, "_TERM_S", 0.1)
    monkeypatch.setattr(subprocess, "Popen", Measured)
    plan = peers.Plan("tiny", receivers=1, rounds=1, passes=1, quiet_s=0.0, block_s=0.2, retries=0)
    before = module("cpu_guard").descendants(os.getpid())  # other tests' forkserver
    row = peers.run(plan, ["memcpy"], lambda line: None)["rows"][0]
    assert row["failed"] == "it did not end within 0 s"
    assert "latency_s" not in row
    semaphore = Path("/dev/shm") / f"sem.{ready.read_text().lstrip('/')}"
    wait_until(lambda: not semaphore.exists(), "removal of its semaphore")
    assert module("cpu_guard").descendants(os.getpid()) == before
