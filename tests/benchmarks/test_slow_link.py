"""The benchmark over a limited link: the limit is real, weights cross it, and nothing of it stays behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.bench.network import enter_network
from weightlane.sync.bench.workload import named_workload

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def slow_link(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("slow_link")


def network_of(pid: int | str) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    return ""


@pytest.mark.usefixtures("limited_links")
def test_both_codecs_cross_a_link_that_carries_what_it_was_limited_to(
    slow_link: ModuleType, networks_held: Callable[[], list[str]]
) -> None:
    mine, threads = network_of("self"), threading.active_count()
    with ThreadPoolExecutor(1) as aside:  # it changes the network of the thread that runs it
        report = aside.submit(
            slow_link.run,
            named_workload("tiny"),
            receivers=1,
            rate_mbit=40.0,
            rounds=1,
            density=0.01,
            codecs=("dense", "delta"),
            integrity="full",
            timeout_s=30.0,
            say=lambda _: None,
        ).result(60)
    assert all(30 < rate < 44 for rate in report["raw_mbit"])
    assert report["verified"]
    dense, delta = report["rows"]["dense"], report["rows"]["delta"]
    assert (dense["sent_as"], delta["sent_as"]) == (["dense"], ["delta"])
    assert dense["wire_bytes"] >= report["payload_bytes"] > 10 * delta["wire_bytes"] > 0
    assert sum(phase["median"] for phase in dense["phases"].values()) == pytest.approx(dense["latency_s"]["median"])
    assert report["dense_over_delta"] > 0
    assert "carried" in slow_link.text(report)
    assert not networks_held()
    assert network_of("self") == mine
    assert threading.active_count() <= threads


@pytest.mark.usefixtures("limited_links")
def test_an_interrupt_ends_every_process_and_with_them_the_link() -> None:
    command = [sys.executable, "-m", "benchmarks.slow_link", "--model", "tiny", "--rounds", "100000"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("round 1"):
                break
        mine = network_of("self")
        theirs = {network_of(pid) for pid in offspring(process.pid)} - {mine, ""}
        assert len(theirs) == 2, "a sender and its receivers are in one network"
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait(10)
        process.stderr.close()
    end = time.monotonic() + 10
    while (
        left := theirs & {network_of(entry.name) for entry in Path("/proc").glob("[0-9]*")}
    ) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def offspring(pid: int) -> list[int]:
    """`pid`, its children, and theirs."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for listed in children for child in listed.read_text().split()]
    return [pid, *(further for child in found for further in offspring(child))]


def test_where_it_cannot_run_it_says_why(networks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert networks.missing() == "ip and tc not found: install iproute2."
    with pytest.raises(ConfigError, match="install iproute2"), networks.limited_link(1.0):
        pass
    monkeypatch.setattr("shutil.which", lambda program: f"/sbin/{program}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "it takes root" in networks.missing()
    with pytest.raises(ConfigError, match="there is no network namespace at"):
        enter_network("/proc/self/fd/100000")
