"""The peer benchmark: what it measures, that it notices wrong values, and what it says of a peer that cannot run."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HANGS = """
import multiprocessing, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = multiprocessing.get_context("spawn").Semaphore(0)
pathlib.Path({path!r}).write_text(lock._semlock.name)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks` belongs to the checkout and is never installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.peers.runner")


@pytest.fixture
def tmpfs(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the peers' shared memory, which must be empty in the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(peers, "_TMPFS", folder)
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


def module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.peers.{name}")


def test_two_peers_are_measured_and_verified_and_nothing_is_left(peers: ModuleType, tmpfs: Path) -> None:
    plan = peers.Plan("tiny", receivers=1, rounds=1, passes=1, quiet_s=0.0, block_s=60.0)
    said: list[str] = []
    report = peers.run(plan, ["copy-in-then-out", "gloo-flat"], said.append)
    assert [row["name"] for row in report["rows"]] == ["copy-in-then-out", "gloo-flat"]
    for row in report["rows"]:
        assert row["verified"], report
        assert row["rounds"] + row["disturbed_rounds"] >= 1
        assert 0 < row["rollout_blocked_s"]["min"] <= row["latency_s"]["median"] < 30
        assert row["trainer_blocked_s"]["median"] > 0
    assert len(said) == 2
    assert module("cpu_guard").descendants(os.getpid()) == []
    table = module("table").markdown(report)
    assert "| gloo-flat |" in table


def test_a_digest_notices_any_bit_and_any_place_and_every_round_changes_every_element(peers: ModuleType) -> None:
    workload = module("workload")
    tiny = workload.workload_named("tiny")
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


def test_the_shapes_are_those_of_the_model(peers: ModuleType) -> None:
    real = module("workload").workload_named("qwen3-0.6b")
    assert (len(real.shapes), real.nbytes) == (310, 1_192_099_840)
    with pytest.raises(ValueError, match="take qwen3"):
        module("workload").workload_named("other")


def test_a_peer_that_cannot_run_says_what_is_missing_and_how_to_get_it(peers: ModuleType) -> None:
    reason = module("peer").Needs(("no_such_module_at_all",), "pip install it").missing()
    assert reason is not None
    assert "no_such_module_at_all" in reason
    assert reason.endswith("pip install it")
    row = peers._row(module("catalogue").catalogue()["nixl"], [{"unavailable": reason}])
    report = {
        "workload": {"name": "tiny", "payload_bytes": 1, "tensors": 1, "receivers": 1},
        "machine": peers.machine(),
        "date": "2026-01-01",
        "rows": [row],
    }
    assert "cannot run here: no_such_module_at_all" in module("table").markdown(report)


def test_the_cpu_time_of_this_process_is_not_held_against_a_round(peers: ModuleType) -> None:
    guard = module("cpu_guard").CpuGuard()
    used = time.process_time()
    guard.start()
    while time.process_time() - used < 0.3:
        pass
    own = module("cpu_guard").family_s(os.getpid())[os.getpid()] - guard._family[os.getpid()]
    foreign_s, _ = guard.stop()
    assert own >= 0.25
    assert foreign_s >= 0.0


def test_a_peer_that_hangs_is_ended_with_all_its_processes(
    peers: ModuleType, tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_MEASURE", HANGS.format(path=str(tmp_path / "semaphore")))
    plan = peers.Plan("tiny", receivers=1, rounds=1, passes=1, quiet_s=0.0, block_s=4.0)
    row = peers.run(plan, ["memcpy"], lambda line: None)["rows"][0]
    assert row["failed"] == "it did not end within 4 s"
    assert "latency_s" not in row
    assert module("cpu_guard").descendants(os.getpid()) == []
    semaphore = Path("/dev/shm") / f"sem.{(tmp_path / 'semaphore').read_text().lstrip('/')}"
    until = time.monotonic() + 10.0
    while semaphore.exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not semaphore.exists()
