"""The peer benchmark: what it measures, that it notices wrong values, and what it says of a peer that cannot run."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
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
        monkeypatch.setattr(peers, "TMPFS", folder)
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


def module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.peers.{name}")


def offspring() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def options(**changed: Any) -> argparse.Namespace:
    defaults = {"model": "tiny", "receivers": 1, "rounds": 1, "passes": 1, "turn_s": NEVER_S, "deadline_s": HANG_S}
    return argparse.Namespace(**{**defaults, "block_s": HANG_S, **changed})


@pytest.mark.exhaustive
@pytest.mark.usefixtures("tmpfs")
def test_a_peer_is_measured_and_verified_and_nothing_is_left(peers: ModuleType) -> None:
    name, before = "copy-in-then-out", offspring()  # other tests' forkserver
    report = peers.run(options(), [name])
    (row,) = report["rows"]
    assert (row["name"], row["rounds"]) == (name, 1)
    assert row["verified"], report
    assert all(row[figure]["median"] > 0 for figure in ("rollout_blocked_s", "latency_s", "trainer_blocked_s"))
    assert offspring() == before
    assert f"| {name} |" in module("report").text(report)


def row_of(name: str, seconds: float, limit_s: float, *, verified: bool = True) -> dict[str, Any]:
    """A row as one run gives it in which `memcpy-all` took `limit_s`."""
    catalogue = module("others").CATALOGUE

    def answers(took_s: float) -> list[dict[str, Any]]:
        times = dict.fromkeys(("trainer_blocked_s", "rollout_blocked_s", "latency_s"), took_s)
        rounds = [{"round": n, "warm_up": n == 0, "verified": verified, **times} for n in range(2)]
        return [{"versions": {}}, *rounds]

    both = {"memcpy-all": answers(limit_s), name: answers(seconds)}
    row: dict[str, Any] = module("report").rows_of(catalogue, both)[-1]
    return row


@pytest.mark.usefixtures("peers")
def test_rows_compare_by_what_they_are_of_their_own_runs_limit_with_the_fastest_through_the_same() -> None:
    report = module("report")
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


def test_a_peer_that_cannot_run_says_what_is_missing_and_how_to_get_it(peers: ModuleType) -> None:
    ray = module("others").CATALOGUE["ray-object-store"]
    absent = dataclasses.replace(ray, modules=("no_such_module_at_all",))
    reason = absent.missing()
    assert "no_such_module_at_all" in reason
    assert reason.endswith("pip install ray")
    rows = module("report").rows_of({absent.name: absent}, {absent.name: [{"unavailable": reason}]})
    assert "cannot run here: no_such_module_at_all" in module("report").text({"rows": rows})
    assert peers.outcome([{"unavailable": reason}]).startswith("unavailable: no_such")


def test_a_peer_that_hangs_is_ended_with_all_its_processes(
    peers: ModuleType, tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, before = tmp_path / "semaphore", offspring()

    class Measured(subprocess.Popen[str]):
        """Its time begins when it hangs, however long it took to come so far."""

        def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:  # noqa: A002
            wait_until(ready.exists, "peer that hangs")
            return super().communicate(input, timeout)

    monkeypatch.setattr(peers, "MEASURE", HANGS.format(path=str(ready)))
    monkeypatch.setattr(peers, "END_S", 0.1)
    monkeypatch.setattr(subprocess, "Popen", Measured)
    report = peers.run(options(block_s=0.2), ["memcpy"])
    (row,) = report["rows"]
    assert row["failed"] == "it did not end within 0 s"
    assert "latency_s" not in row
    assert not report["met"]
    semaphore = Path("/dev/shm") / f"sem.{ready.read_text().lstrip('/')}"
    wait_until(lambda: not semaphore.exists(), "removal of its semaphore")
    assert offspring() == before
    assert list(tmpfs.iterdir()) == []
