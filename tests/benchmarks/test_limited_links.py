"""The benchmarks over limited links: the limit is real, every bit crosses it, and nothing of it stays behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sessions import descriptors, wait_until_closed
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import ConfigError
from weightlane.cli.bench.processes.network_namespace import enter_network
from weightlane.cli.bench.workload.workload import named_workload

ROOT = Path(__file__).resolve().parents[2]


def network_of(pid: int | str) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    return ""


@pytest.mark.usefixtures("limited_links")
def test_every_link_is_limited_where_a_host_sends(networks: ModuleType) -> None:
    with networks.limited_link(40.0) as link, networks.limited_hosts(2, 30.0) as hosts:
        for host, rate in ((link.sender, 40), (link.receiver, 40), *((host, 30) for host in hosts)):
            show = ["tc", "qdisc", "show", "dev", networks.INTERFACE]
            shown = networks.inside(host.namespace, lambda show=show: subprocess.check_output(show, text=True))
            assert re.search(rf"tbf .* rate {rate}Mbit ", shown.result(HANG_S))


@pytest.mark.usefixtures("limited_links")
def test_a_delayed_link_carries_every_byte_later_and_leaves_no_thread_and_no_descriptor(networks: ModuleType) -> None:
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("there is no /dev/net/tun")
    before, delay_ms, data = descriptors(), 30.0, os.urandom(1 << 20)

    def send(host: Any, port: int) -> int:
        with socket.create_connection((host.address, port), HANG_S) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            connection.sendall(data)
            (round_trip_us,) = struct.unpack_from("I", info, 68)  # see linux/tcp.h
            return int(round_trip_us)

    def receive(server: socket.socket) -> bytes:
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as file:
            return file.read()

    with networks.delayed_link(400.0, delay_ms) as link:
        for here, there in ((link.sender, link.receiver), (link.receiver, link.sender)):
            address = there.address, 0
            listen = networks.inside(there.namespace, lambda address=address: socket.create_server(address))
            with listen.result(HANG_S) as server:
                port = server.getsockname()[1]
                received = networks.inside(there.namespace, lambda server=server: receive(server))
                sent = networks.inside(here.namespace, lambda there=there, port=port: send(there, port))
                assert sent.result(HANG_S) >= 2 * 1000 * delay_ms
                assert received.result(HANG_S) == data
    assert not [each for each in threading.enumerate() if each.name == "weightlane-delayed-link"]
    wait_until_closed(before)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("limited_links")
def test_both_codecs_cross_a_limited_link_and_no_thread_and_no_network_of_it_stays(slow_link: ModuleType) -> None:
    mine, threads = network_of("self"), threading.active_count()
    settings = {"rate_mbit": 40.0, "rounds": 1, "integrity": "full", "timeout_s": HANG_S, "say": lambda _: None}
    more = {"receivers": 1, "density": 0.01, "codecs": ("dense", "delta")}
    with ThreadPoolExecutor(1) as aside:  # it changes the network of the thread that runs it
        report = aside.submit(slow_link.run, named_workload("tiny"), **settings, **more).result()
    networks = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert not [target for target in networks if target.startswith("net:")]
    assert network_of("self") == mine
    wait_until(lambda: threading.active_count() <= threads, "end of its threads")
    assert all(rate > 0 for rate in report["raw_mbit"])
    assert report["verified"]
    dense, delta = report["rows"]["dense"], report["rows"]["delta"]
    assert (dense["sent_as"], delta["sent_as"]) == (["dense"], ["delta"])
    assert dense["wire_bytes"] >= report["payload_bytes"] > 10 * delta["wire_bytes"] > 0
    assert sum(phase["median"] for phase in dense["phases"].values()) == pytest.approx(dense["latency_s"]["median"])
    assert report["dense_over_delta"] > 0
    assert "carried" in slow_link.text(report)


@pytest.mark.exhaustive  # three processes import torch
@pytest.mark.usefixtures("limited_links")
def test_an_interrupt_ends_every_process_and_with_them_the_link(children: Any) -> None:
    process = children.start(
        ["-m", "benchmarks.slow_link", "--model", "tiny", "--rounds", "100000"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    for line in process.stderr:
        if line.startswith("round 1"):
            break
    theirs = {network_of(pid) for pid in offspring(process.pid)} - {network_of("self"), ""}
    assert len(theirs) == 2, "a sender and its receivers are in one network"
    process.send_signal(signal.SIGINT)
    process.stderr.read()
    assert process.wait(HANG_S) == 130
    wait_until(
        lambda: not theirs & {network_of(entry.name) for entry in Path("/proc").glob("[0-9]*")},
        "end of everything in its networks",
    )


def offspring(pid: int) -> list[int]:
    """`pid`, its children, and theirs."""
    found = [pid]
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found += [further for child in listed.read_text().split() for further in offspring(int(child))]
    return found


def test_where_it_cannot_run_it_says_why(networks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert networks.missing() == "ip and tc not found: install iproute2."
    for made in (networks.limited_link(1.0), networks.limited_hosts(2, 1.0)):
        with pytest.raises(ConfigError, match="install iproute2"), made:
            pass
    monkeypatch.setattr("shutil.which", lambda program: f"/sbin/{program}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "it takes root" in networks.missing()
    with pytest.raises(ConfigError, match="there is no network namespace at"):
        enter_network("/proc/self/fd/100000")
