"""How much sooner a delta is there than a full version when the link between the two sides is slow.

    python -m benchmarks.slow_link --model qwen3-0.6b --json slow_link.json

The sender and the coordinator live in one network namespace, the receivers in another; a veth pair joins them, both ends
limited by tc (token bucket) to --rate-mbit. With --delay-ms two TUN devices join them, between which packets are held up.
Weights, manifests and all control messages cross the link; only the benchmark's own calls to its processes go through Unix
sockets. Each version changes 1 % (--density) of the elements, at random positions. Before the first round, and after the last, a
plain TCP transfer shows what the link carries.

Linux only; it takes root and the programs ip and tc (Debian's iproute2). The namespaces have no names: they go with the last
process in them, however the benchmark ends.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from weightlane.ckpt_engines import WeightlaneError
from weightlane.cli.bench.contenders.weightlane_row import RowContender, RowFacts
from weightlane.cli.bench.processes.participants import sync_config
from weightlane.cli.bench.processes.processes import Processes
from weightlane.cli.bench.report.bench_report import PHASES
from weightlane.cli.bench.report.machine import this_machine
from weightlane.cli.bench.workload.workload import Workload, named_workload

from .command import finish, options_of, say
from .networks import INTERFACE, RAW_S, delayed_link, limited_link, on, raw_mbit

_RAW_OVER_DELAY_S = 4.0
"""How long a raw transfer goes on where its window has to open first."""


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
    delay_ms: float = 0.0,
) -> dict[str, Any]:
    """Measure all `codecs` in turns over a limited link; seconds, bytes, and whether every bit was right."""
    joined = delayed_link(rate_mbit, delay_ms) if delay_ms else limited_link(rate_mbit)
    raw_s = _RAW_OVER_DELAY_S if delay_ms else RAW_S
    with joined as link:
        rates = [raw_mbit(link.sender, [link.receiver], rate_mbit, raw_s)]
        say(f"the link carries {rates[0]:.0f} Mbit/s")
        with (
            on(link.sender),
            Processes(receivers, workload.flat_bytes) as processes,
            asyncio.Runner() as runner,
        ):
            for receiver in processes.receivers:
                receiver.call("enter_network", link.receiver.namespace, timeout_s=timeout_s)
            processes.every("prepare", workload.to_plain(), 0, 1, timeout_s=timeout_s)
            rows = []
            for codec in codecs:
                config = sync_config(codec=codec, integrity=integrity, bucket_mib=None, deadline_s=timeout_s)
                facts = RowFacts(
                    "gloo",
                    codec,
                    integrity,
                    {"interface": INTERFACE},
                    config.model_copy(update={"host": link.sender.address}),
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
        rates.append(raw_mbit(link.sender, [link.receiver], rate_mbit, raw_s))
    table = {
        row.facts.codec: {
            "latency_s": _spread([figures["latency_s"] for figures in found[row.facts.codec]]),
            "rollout_blocked_s": _spread([figures["rollout_blocked_s"] for figures in found[row.facts.codec]]),
            "phases": {phase: _spread([figures[phase] for figures in found[row.facts.codec]]) for phase in PHASES},
            "wire_bytes": round(statistics.median(figures["wire_bytes"] for figures in found[row.facts.codec])),
            "share_of_link": statistics.median(
                8e-6 * figures["wire_bytes"] * receivers / figures["latency_s"] / statistics.mean(rates)
                for figures in found[row.facts.codec]
            ),
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
        "delay_ms": delay_ms,
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
        (
            f"link limited to {report['rate_mbit']:.0f} Mbit/s, delay {report['delay_ms']:.0f} ms each way,"
            f" carried {rates} Mbit/s before and after (TCP payload)"
        ),
        f"{'codec':6} {'latency s':>10} {'least':>8} {'most':>8} {'wire bytes':>14} {'of dense':>9}",
    ]
    for codec, row in report["rows"].items():
        latency = row["latency_s"]
        lines.append(
            f"{codec:6} {latency['median']:10.3f} {latency['min']:8.3f} {latency['max']:8.3f} {row['wire_bytes']:14,}"
            f" {row['wire_bytes'] / report['payload_bytes']:9.2%}, {row['share_of_link']:.0%} of the link"
            f"{'' if row['verified'] else '  NOT VERIFIED'}"
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
    parser.add_argument("--delay-ms", type=float, default=0.0, help="how much later what is sent arrives, each way")
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
            delay_ms=options.delay_ms,
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
