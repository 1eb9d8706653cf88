"""How much sooner a delta is there than a full version when the link between the two sides is slow.

    python -m benchmarks.slow_link --model qwen3-0.6b --json slow_link.json

The sender and the coordinator live in one network namespace, the receivers in another; a veth pair joins them, both ends
limited by tc (token bucket) to --rate-mbit. Weights, manifests and all control messages cross it; only the benchmark's own calls
to its processes go through Unix sockets. Each version changes 1 % (--density) of the elements, at random positions. Before the
first round, and after the last, a plain TCP transfer shows what the link carries.

Linux only; it takes root and the programs ip and tc (Debian's iproute2). The namespaces have no names: they go with the last
process in them, however the benchmark ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from weightlane.ckpt_engines import ConfigError, WeightlaneError
from weightlane.sync.bench.machine import this_machine
from weightlane.sync.bench.network import enter_network, new_network
from weightlane.sync.bench.participants import sync_config
from weightlane.sync.bench.processes import Processes
from weightlane.sync.bench.report import PHASES
from weightlane.sync.bench.rows import RowContender, RowFacts
from weightlane.sync.bench.workload import Workload, named_workload

from .command import finish, options_of, say

INTERFACE = "wl0"
"""Of both ends, each in its own namespace."""
SENDER_HOST, RECEIVER_HOST = "10.83.71.1", "10.83.71.2"
_BURST_BYTES = 256 << 10
"""What may pass at once: four of the largest segments the kernel hands down, a quarter of a percent of a second's worth."""
_QUEUE_MS = 50
_COMMAND_S = 20.0
_PIECE_BYTES = 1 << 20
_TRAFFIC_CONTROL_S = 0.5
"""A raw transfer must take about so long, against a burst that passes unhindered."""


@dataclass(frozen=True, slots=True)
class Link:
    """Two namespaces that see each other only."""

    sender: str
    """Path of the sending side's namespace."""
    receiver: str
    rate_mbit: float


def missing() -> str:
    """Why no such link can be made here; empty when it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's."
    if absent := [program for program in ("ip", "tc") if shutil.which(program) is None]:
        return f"{' and '.join(absent)} not found: install iproute2."
    if os.geteuid() != 0:
        return "it takes root to make network namespaces and to limit a link."
    return ""


def inside(namespace: str, work: Callable[[], Any]) -> Future[Any]:
    """Do `work` on a thread of its own in `namespace`."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            enter_network(namespace)
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            done.set_exception(error)

    threading.Thread(target=run, name="weightlane-slow-link", daemon=True).start()
    return done


@contextlib.contextmanager
def limited_link(rate_mbit: float) -> Iterator[Link]:
    """Two fresh namespaces joined by a link of that rate in each direction.

    Raises `ConfigError` where the system does not allow it, or ip or tc fail.
    """
    if reason := missing():
        raise ConfigError(reason, part="slow link")
    with contextlib.ExitStack() as opened:
        paths = []
        for _ in range(2):
            made: Future[int] = Future()
            threading.Thread(target=_make_network, args=(made,), daemon=True).start()
            descriptor = made.result(_COMMAND_S)
            opened.callback(os.close, descriptor)
            paths.append(f"/proc/{os.getpid()}/fd/{descriptor}")
        link = Link(*paths, rate_mbit)
        peer = f"ip link add {INTERFACE} type veth peer name {INTERFACE} netns {link.receiver}"
        inside(link.sender, lambda: _command(peer)).result(_COMMAND_S)
        for path, host in ((link.sender, SENDER_HOST), (link.receiver, RECEIVER_HOST)):
            inside(path, lambda host=host: _set_up(host, rate_mbit)).result(5 * _COMMAND_S)  # type: ignore[misc]
        yield link


def _make_network(made: Future[int]) -> None:
    try:
        made.set_result(new_network())
    except BaseException as error:  # noqa: BLE001 - raised by whoever waits
        made.set_exception(error)


def _set_up(host: str, rate_mbit: float) -> None:
    _command("ip link set lo up")
    _command(f"ip address add {host}/30 dev {INTERFACE}")
    _command(f"ip link set {INTERFACE} up")
    limit = f"rate {round(rate_mbit * 1000)}kbit burst {_BURST_BYTES} latency {_QUEUE_MS}ms"
    _command(f"tc qdisc add dev {INTERFACE} root tbf {limit}")


def _command(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, timeout=_COMMAND_S, check=False)  # noqa: S603 - ours
    if done.returncode:
        raise ConfigError(f"`{line}` failed: {done.stderr.strip()}", part="slow link")


def raw_mbit(link: Link) -> float:
    """What one TCP connection carries from the sending to the receiving side, in Mbit of payload per second."""
    nbytes = max(_PIECE_BYTES, round(link.rate_mbit * 1e6 / 8 * _TRAFFIC_CONTROL_S))
    listening: Future[int] = Future()

    def receive() -> float:
        with socket.create_server((RECEIVER_HOST, 0)) as server:
            server.settimeout(_COMMAND_S)
            listening.set_result(server.getsockname()[1])
            connection, _ = server.accept()
            with connection:
                connection.settimeout(_COMMAND_S)
                buffer, left = bytearray(_PIECE_BYTES), nbytes
                while left:
                    if not (got := connection.recv_into(buffer, min(left, len(buffer)))):
                        raise ConfigError("the connection ended early.", part="slow link")
                    left -= got
                return time.monotonic()

    def send() -> float:
        with socket.create_connection((RECEIVER_HOST, listening.result(_COMMAND_S)), _COMMAND_S) as connection:
            started, piece, left = time.monotonic(), memoryview(bytes(_PIECE_BYTES)), nbytes
            while left:
                connection.sendall(piece[: min(left, len(piece))])
                left -= min(left, len(piece))
            return started

    wait_s = 2 * _COMMAND_S + 8e-6 * nbytes / link.rate_mbit
    received, sent = inside(link.receiver, receive), inside(link.sender, send)
    started = sent.result(wait_s)
    return 8e-6 * nbytes / (float(received.result(wait_s)) - float(started))


@contextlib.contextmanager
def _on_the_sending_side(link: Link) -> Iterator[None]:
    """This thread, and all that it starts, is in the sender's namespace meanwhile."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter_network(link.sender)
        yield
    finally:
        enter_network(f"/proc/self/fd/{before}")
        os.close(before)


def run(
    workload: Workload,
    *,
    receivers: int,
    rate_mbit: float,
    rounds: int,
    density: float,
    codecs: tuple[str, ...],
    integrity: str,
    timeout_s: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure all `codecs` in turns over a limited link; seconds, bytes, and whether every bit was right."""
    with limited_link(rate_mbit) as link:
        rates = [raw_mbit(link)]
        say(f"the link carries {rates[0]:.0f} Mbit/s")
        with (
            _on_the_sending_side(link),
            Processes(receivers, workload.flat_bytes) as processes,
            asyncio.Runner() as runner,
        ):
            for receiver in processes.receivers:
                receiver.call("enter_network", link.receiver, timeout_s=timeout_s)
            processes.every("prepare", workload.to_plain(), 0, 1, timeout_s=timeout_s)
            rows = []
            for codec in codecs:
                config = sync_config(codec=codec, integrity=integrity, bucket_mib=None, deadline_s=timeout_s)
                facts = RowFacts(
                    "gloo", codec, integrity, {"interface": INTERFACE}, config.model_copy(update={"host": SENDER_HOST})
                )
                rows.append(RowContender(facts, processes, runner, density, 0.0, timeout_s))
            found: dict[str, list[dict[str, float]]] = {row.facts.codec: [] for row in rows}
            sent_as: dict[str, list[str]] = {row.facts.codec: [] for row in rows}
            try:
                for row in rows:
                    say(f"warming up {row.name}")
                    row.open()
                for number in range(rounds):
                    for row in rows:
                        figures = row.round()
                        say(f"round {number + 1} of {rounds}: {row.facts.codec} {figures['latency_s']:.3f} s")
                        found[row.facts.codec].append(figures)
                        assert row.last is not None, "a version was carried"
                        sent_as[row.facts.codec].append(row.last.codec)
                for row in rows:
                    row.close()
            except WeightlaneError as error:
                processes.raise_if_dead(error)
                raise
        rates.append(raw_mbit(link))
    table = {
        row.facts.codec: {
            "latency_s": _spread([figures["latency_s"] for figures in found[row.facts.codec]]),
            "rollout_blocked_s": _spread([figures["rollout_blocked_s"] for figures in found[row.facts.codec]]),
            "phases": {phase: _spread([figures[phase] for figures in found[row.facts.codec]]) for phase in PHASES},
            "wire_bytes": round(statistics.median(figures["wire_bytes"] for figures in found[row.facts.codec])),
            "sent_as": sent_as[row.facts.codec],
            "verified": row.verified,
        }
        for row in rows
    }
    report: dict[str, Any] = {
        "machine": this_machine().model_dump(),
        "date": datetime.now(UTC).date().isoformat(),
        "model": workload.name,
        "payload_bytes": workload.nbytes,
        "receivers": receivers,
        "density": density,
        "integrity": integrity,
        "rounds": rounds,
        "rate_mbit": rate_mbit,
        "raw_mbit": rates,
        "rows": table,
        "verified": all(row.verified for row in rows),
    }
    if {"dense", "delta"} <= table.keys():
        report["dense_over_delta"] = table["dense"]["latency_s"]["median"] / table["delta"]["latency_s"]["median"]
    return report


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def text(report: dict[str, Any]) -> str:
    """The report as a table."""
    rates = " and ".join(f"{rate:.0f}" for rate in report["raw_mbit"])
    lines = [
        f"{report['model']}: {report['payload_bytes'] / 1e6:.1f} MB, receivers: {report['receivers']}, gloo",
        f"{report['density']:.2%} of the elements change, integrity {report['integrity']}",
        f"link limited to {report['rate_mbit']:.0f} Mbit/s, carried {rates} Mbit/s before and after (TCP payload)",
        f"{'codec':6} {'latency s':>10} {'least':>8} {'most':>8} {'wire bytes':>14} {'of dense':>9}",
    ]
    for codec, row in report["rows"].items():
        latency = row["latency_s"]
        lines.append(
            f"{codec:6} {latency['median']:10.3f} {latency['min']:8.3f} {latency['max']:8.3f} {row['wire_bytes']:14,}"
            f" {row['wire_bytes'] / report['payload_bytes']:9.2%}{'' if row['verified'] else '  NOT VERIFIED'}"
        )
    lines.append("what the latency consists of, in ms: " + ", ".join(PHASES))
    for codec, row in report["rows"].items():
        lines.append(f"{codec:6} " + " ".join(f"{1e3 * row['phases'][phase]['median']:8.0f}" for phase in PHASES))
    if "dense_over_delta" in report:
        lines.append(f"a delta is there {report['dense_over_delta']:.1f} times sooner")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON if asked to; 1 if any bit was wrong, 2 where it cannot run here."""
    parser = options_of(__doc__, model="qwen3-0.6b", rounds=3, deadline_s=120.0)
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--rate-mbit", type=float, default=1000.0)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--codec", default="dense,delta", help="of dense, delta, auto")
    parser.add_argument("--integrity", default="off", choices=["off", "full"])
    options = parser.parse_args(arguments)
    if min(options.receivers, options.rounds) < 1 or options.rate_mbit <= 0:
        parser.error("--receivers, --rounds and --rate-mbit must be positive")
    return finish(
        "slow_link",
        lambda: run(
            named_workload(options.model),
            receivers=options.receivers,
            rate_mbit=options.rate_mbit,
            rounds=options.rounds,
            density=options.density,
            codecs=tuple(options.codec.split(",")),
            integrity=options.integrity,
            timeout_s=options.deadline_s,
            say=say,
        ),
        text,
        options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
