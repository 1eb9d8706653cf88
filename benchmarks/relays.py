"""How much sooner a version is everywhere when receivers hand it on, where the trainer's network card is what takes longest.

    python -m benchmarks.relays [--receivers 4] [--rate-mbit 400] [--rounds 5] [--json FILE]

One trainer rank and some rollout replicas of one rank, each in a network namespace of its own. A bridge joins them, and each
one's link is limited by tc (token bucket) to --rate-mbit in both directions. The same version goes over gloo in two ways, in
turns:

- *star*: the trainer rank sends to every replica itself (`sync.relay = "off"`).
- *relays*: replicas relay in a chain (`sync.relay = "chain"`).

A round changes every element. Latency is from `publish` to the last replica's commit; then all replicas' weights are compared
with the trainer's by checksum. Beside it stands the bound: what the busiest card of the planned route needs for its bytes alone.
What each card has really sent is read from the interfaces: a bucket for all receivers is a broadcast of gloo, which is a tree of
its own, so that the star's trainer sends less often than it has replicas. Plain TCP, before the first round and after the last,
shows what the links carry.

Linux only; it takes root and the programs ip and tc (Debian's iproute2). The namespaces have no names: they go with the last
process in them, however the benchmark ends.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from weightlane.ckpt_engines import WeightlaneError
from weightlane.cli.bench.contenders.weightlane_row import RowContender, RowFacts
from weightlane.cli.bench.processes.participants import SENDER, sync_config
from weightlane.cli.bench.processes.processes import Processes
from weightlane.cli.bench.processes.worker import subscriber_name
from weightlane.cli.bench.report.bench_report import PHASES
from weightlane.cli.bench.report.machine import this_machine
from weightlane.cli.bench.workload.workload import Workload, named_workload
from weightlane.sync import SyncConfig, TensorSpec
from weightlane.sync.plan.plan_report import plan_report
from weightlane.sync.version.placement import Placement

from .command import finish, options_of, say
from .networks import INTERFACE, Host, limited_hosts, on, raw_mbit, sent_bytes

ENGINE = "gloo"
MATRICES = "16-matrices"
"""134 MB of bfloat16."""


def workload_named(model: str) -> Workload:
    """`MATRICES`, or what `weightlane bench` knows by that name."""
    if model != MATRICES:
        return named_workload(model)
    return Workload(MATRICES, tuple(TensorSpec(f"layer.{n}", (2048, 2048), torch.bfloat16) for n in range(16)))


@dataclass(frozen=True, slots=True)
class Way(RowFacts):
    """A row: one way of reaching all replicas."""

    way: str

    @property
    def name(self) -> str:
        """For people, and as a key."""
        return self.way


def ways(host: str, *, bucket_mib: float, integrity: str, timeout_s: float) -> tuple[Way, Way]:
    """Star and relays; `host` is where the coordinator listens."""
    base = sync_config(codec="dense", integrity=integrity, bucket_mib=bucket_mib, deadline_s=timeout_s)
    relay = {"star": "off", "relays": "chain"}
    star, relays = (
        Way(
            ENGINE,
            "dense",
            integrity,
            {"interface": INTERFACE},
            base.model_copy(update={"host": host, "relay": how}),
            name,
        )
        for name, how in relay.items()
    )
    return star, relays


def planned(workload: Workload, receivers: int, config: SyncConfig, rate_mbit: float) -> dict[str, Any]:
    """The route that a session with this configuration takes, and the seconds that its busiest card needs."""
    whole = Placement.whole(workload.specs)
    needed = {subscriber_name(number): whole for number in range(receivers)}
    gbps = rate_mbit / 1000
    report = plan_report({SENDER: whole}, needed, relay=config.relay, sender_gbps=gbps, receiver_gbps=gbps)
    busiest = [report[f"busiest_{side}"] for side in ("sender", "receiver", "relay")]
    return {
        "routes": ["star" if config.relay == "off" else config.relay],
        "bound_s": max(most["seconds"] for most in busiest if most is not None),
    }


def run(
    workload: Workload,
    *,
    receivers: int,
    rate_mbit: float,
    bucket_mib: float,
    rounds: int,
    integrity: str,
    timeout_s: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure both ways by turns; seconds, bytes by card, and whether every bit was right."""
    with limited_hosts(1 + receivers, rate_mbit) as hosts:
        trainer, *rollouts = hosts
        facts = ways(trainer.address, bucket_mib=bucket_mib, integrity=integrity, timeout_s=timeout_s)
        plans = {each.name: planned(workload, receivers, each.config, rate_mbit) for each in facts}
        raw = [_raw(hosts, rate_mbit)]
        say(f"the links carry {_rates(raw[0])}")
        with on(trainer), Processes(receivers, workload.flat_bytes) as processes, asyncio.Runner() as runner:
            for receiver, host in zip(processes.receivers, rollouts, strict=True):
                receiver.call("enter_network", host.namespace, timeout_s=timeout_s)
            processes.every("prepare", workload.to_plain(), 0, 1, timeout_s=timeout_s)
            rows = [RowContender(each, processes, runner, 1.0, 0.0, timeout_s) for each in facts]
            found: dict[str, list[dict[str, float]]] = {row.name: [] for row in rows}
            sent: dict[str, list[list[int]]] = {row.name: [] for row in rows}
            try:
                for row in rows:
                    say(f"warming up {row.name}")
                    row.open()
                for number in range(rounds):
                    for row in rows if number % 2 == 0 else rows[::-1]:
                        processes.sender.call("change", 1.0, timeout_s=timeout_s)
                        before = [sent_bytes(host) for host in hosts]
                        figures = row.sync(0.0)
                        after = [sent_bytes(host) for host in hosts]
                        row.verify()
                        say(f"round {number + 1} of {rounds}: {row.name} {figures['latency_s']:.3f} s")
                        found[row.name].append(figures)
                        sent[row.name].append([now - then for then, now in zip(before, after, strict=True)])
                for row in rows:
                    row.close()
            except WeightlaneError as error:
                processes.raise_if_dead(error)
                raise
        raw.append(_raw(hosts, rate_mbit))
    table = {
        row.name: plans[row.name]
        | {
            "latency_s": _spread([figures["latency_s"] for figures in found[row.name]]),
            "phases": {phase: _spread([figures[phase] for figures in found[row.name]]) for phase in PHASES},
            "card_sent_bytes": [round(statistics.median(card)) for card in zip(*sent[row.name], strict=True)],
            "verified": row.verified,
        }
        for row in rows
    }
    for figures in table.values():
        figures["busiest_card_s"] = 8e-6 * max(figures["card_sent_bytes"]) / rate_mbit
    return {
        "machine": this_machine().model_dump(),
        "date": datetime.now(UTC).date().isoformat(),
        "model": workload.name,
        "payload_bytes": workload.nbytes,
        "receivers": receivers,
        "rate_mbit": rate_mbit,
        "bucket_bytes": facts[0].config.bucket_bytes,
        "integrity": integrity,
        "rounds": rounds,
        "raw_mbit": raw,
        "rows": table,
        "star_over_relays": table["star"]["latency_s"]["median"] / table["relays"]["latency_s"]["median"],
        "verified": all(row.verified for row in rows),
    }


def _raw(hosts: Sequence[Host], rate_mbit: float) -> dict[str, float]:
    trainer, *rollouts = hosts
    found = {
        "to one": raw_mbit(trainer, rollouts[:1], rate_mbit),
        "to all at once": raw_mbit(trainer, rollouts, rate_mbit),
    }
    if len(rollouts) > 1:
        found["from one to the next"] = raw_mbit(rollouts[0], rollouts[1:2], rate_mbit)
    return found


def _rates(raw: dict[str, float]) -> str:
    return ", ".join(f"{rate:.0f} {which}" for which, rate in raw.items()) + " (Mbit/s of TCP payload)"


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def text(report: dict[str, Any]) -> str:
    """The report as a table."""
    payload = report["payload_bytes"]
    what = f"{payload / 1e6:.1f} MB from one trainer rank to {report['receivers']} replicas over {ENGINE}"
    how = f"buckets of {report['bucket_bytes'] / (1 << 20):g} MiB, integrity {report['integrity']}, {report['rounds']} rounds"
    head = (
        f"{'way':7} {'route':6} {'latency s':>10} {'least':>7} {'most':>7} {'bound':>7}"
        f" {'sent s':>7} {'x sent':>7} {'payloads sent by trainer':>25} {'busiest replica':>16}"
    )
    lines = [
        f"{report['model']}: {what}, {how}",
        f"each link limited to {report['rate_mbit']:.0f} Mbit/s in both directions",
        f"carried before: {_rates(report['raw_mbit'][0])}",
        f"carried after: {_rates(report['raw_mbit'][-1])}",
        head,
    ]
    for name, row in report["rows"].items():
        latency, (trainer, *rollouts) = row["latency_s"], row["card_sent_bytes"]
        lines.append(
            f"{name:7} {'+'.join(row['routes']):6} {latency['median']:10.3f} {latency['min']:7.3f}"
            f" {latency['max']:7.3f} {row['bound_s']:7.3f} {row['busiest_card_s']:7.3f}"
            f" {latency['median'] / row['busiest_card_s']:7.2f} {trainer / payload:25.2f} {max(rollouts) / payload:16.2f}"
            f"{'' if row['verified'] else '  NOT VERIFIED'}"
        )
    lines.append("bound: of the planned route; sent: what the busiest card needs for what it has really sent")
    lines.append("what the latency consists of, in ms: " + ", ".join(PHASES))
    for name, row in report["rows"].items():
        lines.append(f"{name:7} " + " ".join(f"{1e3 * row['phases'][phase]['median']:8.0f}" for phase in PHASES))
    lines.append(f"with relays a version is everywhere {report['star_over_relays']:.2f} times sooner")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON if asked to; 1 if any bit was wrong, 2 where it cannot run here."""
    parser = options_of(__doc__, model=MATRICES, rounds=5, deadline_s=120.0)
    parser.add_argument("--receivers", type=int, default=4)
    parser.add_argument("--rate-mbit", type=float, default=400.0)
    parser.add_argument("--bucket-mib", type=float, default=4.0)
    parser.add_argument("--integrity", default="full", choices=["off", "full"])
    options = parser.parse_args(arguments)
    if min(options.receivers, options.rounds) < 1 or min(options.rate_mbit, options.bucket_mib) <= 0:
        parser.error("--receivers, --rounds, --rate-mbit and --bucket-mib must be positive")
    return finish(
        "relays",
        lambda: run(
            workload_named(options.model),
            receivers=options.receivers,
            rate_mbit=options.rate_mbit,
            bucket_mib=options.bucket_mib,
            rounds=options.rounds,
            integrity=options.integrity,
            timeout_s=options.deadline_s,
            say=say,
        ),
        text,
        options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
