"""The peer benchmark: what it measures, that it notices wrong values, and what it says of a peer that cannot run."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from waiting import HANG_S, NEVER_S, wait_until


@pytest.fixture
def tmpfs(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the peers' shared memory, which must be empty in the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(peers, "TMPFS", folder)
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


def options(**changed: Any) -> argparse.Namespace:
    defaults = {"model": "tiny", "receivers": 1, "rounds": 1, "passes": 1, "turn_s": NEVER_S, "deadline_s": HANG_S}
    return argparse.Namespace(**{**defaults, **changed})


@pytest.mark.exhaustive
@pytest.mark.usefixtures("tmpfs")
def test_a_peer_is_measured_and_verified_and_nothing_is_left(peers: ModuleType) -> None:
    name, before = "copy-in-then-out", {*psutil.Process().children(recursive=True)}  # other tests' forkserver
    report = peers.run(options(), [name])
    (row,) = report["rows"]
    assert (row["name"], row["rounds"]) == (name, 1)
    assert row["verified"], report
    assert all(row[figure]["median"] > 0 for figure in ("rollout_blocked_s", "latency_s", "trainer_blocked_s"))
    assert {*psutil.Process().children(recursive=True)} == before
    assert f"| {name} |" in importlib.import_module("benchmarks.peers.report").text(report)


def row_of(name: str, seconds: float, limit_s: float, *, verified: bool = True) -> dict[str, Any]:
    """A row as one run gives it in which `memcpy-all` took `limit_s`."""
    catalogue = importlib.import_module("benchmarks.peers.catalogue").CATALOGUE

    def found(took_s: float) -> dict[str, Any]:
        times = dict.fromkeys(("trainer_blocked_s", "rollout_blocked_s", "latency_s"), took_s)
        return {"rounds": [{"warm_up": number == 0, "verified": verified, **times} for number in range(2)]}

    both = {"memcpy-all": found(limit_s), name: found(seconds)}
    row: dict[str, Any] = importlib.import_module("benchmarks.peers.report").rows_of(catalogue, both)[-1]
    return row


@pytest.mark.usefixtures("peers")
def test_rows_compare_by_what_they_are_of_their_own_runs_limit_with_the_fastest_through_the_same() -> None:
    report = importlib.import_module("benchmarks.peers.report")
    rows = [
        row_of("nixl", 4.0, 2.0),
        row_of("ray-object-store", 3.0, 1.0),
        row_of("weightlane-shm-unchecked", 1.0, 1.0),
    ]
    whole = {"rows": [*rows, row_of("gloo-flat", 0.1, 1.0)]}
    assert report.fastest_peers(whole)["memory"]["name"] == "nixl"
    assert "| 1.0 | 0.50 (nixl) |" in report.text(whole)
    whole["rows"][0] = row_of("nixl", 4.0, 2.0, verified=False)
    assert report.fastest_peers(whole)["memory"]["name"] == "ray-object-store"
    assert "WRONG VALUES" in report.text(whole)


def replaced(peers: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, **changed: Any) -> None:
    """Change a peer of the catalogue."""
    monkeypatch.setitem(peers.CATALOGUE, name, dataclasses.replace(peers.CATALOGUE[name], **changed))


@pytest.mark.usefixtures("tmpfs")
def test_a_peer_that_cannot_run_says_what_is_missing_and_how_to_get_it(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced(peers, monkeypatch, "ray-object-store", modules=("no_such_module_at_all",))
    report = peers.run(options(), ["ray-object-store"])
    reason = report["rows"][0]["unavailable"]
    assert "no_such_module_at_all" in reason
    assert reason.endswith("pip install ray")
    assert "cannot run here: no_such_module_at_all" in importlib.import_module("benchmarks.peers.report").text(report)


def test_a_peer_that_hangs_is_ended_with_all_its_processes(
    peers: ModuleType, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.PeerProcesses, "worker", "hanging_peer")
    copies, family = peers.CATALOGUE["memcpy"].opened, set[psutil.Process]()

    @contextlib.contextmanager
    def hanging(turn: Any) -> Iterator[Any]:
        with copies(turn):
            family.update({*psutil.Process().children(recursive=True)} - before)
            receiver = turn.processes.receivers[0]
            yield lambda: receiver.call("copy_aside", 0.0, timeout_s=0.1)

    before = {*psutil.Process().children(recursive=True)}
    replaced(peers, monkeypatch, "memcpy", opened=hanging)
    report = peers.run(options(), ["memcpy"])
    (row,) = report["rows"]
    assert "did not end within" in row["failed"]
    assert "latency_s" not in row
    assert not report["met"]
    assert len(family) > 3, "the fork server, two halves, and what these have started"
    wait_until(lambda: not [each for each in family if each.is_running() and each.status() != "zombie"], "their end")
    assert list(tmpfs.iterdir()) == []
