"""Dense, delta and auto at densities from 0 to 1: what each takes, what auto chooses, and how far that is from the better choice.

    python -m benchmarks.densities --json densities.json

Every version goes through all three in turns, in changing order: the parameters change, and each carries that very change. The
connections stay open from one density to the next, as in training that changes its pace. Of every density the first --warm
versions are left out: auto measures before it decides, and needs some versions to notice that the density is another one.

Two ratios tell how good auto is. *measured* is its median latency over that of the faster one of the two. *by choice* takes the
medians of dense and delta for what auto chose, version by version: noise that hit auto alone is not in it, nor is what
deciding costs. Both are medians: a version by which auto measures the codec it does not use shows in what it chose, not in them.
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
from weightlane.cli.bench.processes.participants import sync_config
from weightlane.cli.bench.processes.processes import Processes, Worker
from weightlane.cli.bench.report.machine import this_machine
from weightlane.cli.bench.workload.workload import Workload, named_workload
from weightlane.sync import TensorSpec

from .command import finish, options_of, say

DENSITIES = (0.0, 0.0001, 0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0)
CODECS = ("dense", "delta", "auto")
MIDDLE = "32-matrices"
"""268 MB of bfloat16."""
AT_MOST = 1.05


@dataclass(frozen=True, slots=True)
class _Carried:
    """A version by one row."""

    latency_s: float
    wire_bytes: int
    sent_as: str
    reason: str


def workload_named(model: str) -> Workload:
    """`MIDDLE`, or what `weightlane bench` knows by that name."""
    if model != MIDDLE:
        return named_workload(model)
    return Workload(MIDDLE, tuple(TensorSpec(f"layer.{n}", (2048, 2048), torch.bfloat16) for n in range(32)))


def measure_engine(
    engine: str,
    processes: Processes,
    runner: asyncio.Runner,
    *,
    densities: Sequence[float],
    warm: int,
    versions: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """One entry per density; what is carried must have been prepared."""
    rows = []
    for codec in CODECS:
        config = sync_config(codec=codec, integrity="off", bucket_mib=None, deadline_s=timeout_s)
        rows.append(RowContender(RowFacts(engine, codec, "off", {}, config), processes, runner, 0.0, 0.0, timeout_s))
    for row in rows:
        row.open()
    found = []
    for density in densities:
        say(f"{engine}, density {density:g}")
        for row in rows:
            row.verified = True
        sender = processes.sender
        steps = [_step(number, rows, sender, density, timeout_s) for number in range(warm + versions)]
        verified = all(row.verified for row in rows)
        found.append(_figures(density, steps, warm, verified=verified))
        found[-1]["engine"] = engine
    for row in rows:
        row.close()
    return found


def _step(
    number: int, rows: Sequence[RowContender], sender: Worker, density: float, timeout_s: float
) -> dict[str, _Carried]:
    """The parameters change, and every row carries that; by codec."""
    sender.call("change", density, timeout_s=timeout_s)
    first = number % len(rows)
    carried = {}
    for position, row in enumerate([*rows[first:], *rows[:first]]):
        figures = row.sync(0.0)
        if position == 0:  # later ones find in place what the first one wrote
            row.verify()
        assert row.last is not None, "a version was carried"
        carried[row.facts.codec] = _Carried(
            figures["latency_s"], round(figures["wire_bytes"]), row.last.codec, row.last.codec_reason
        )
    return carried


def _figures(density: float, steps: Sequence[dict[str, _Carried]], warm: int, *, verified: bool) -> dict[str, Any]:
    latency = {codec: [step[codec].latency_s for step in steps[warm:]] for codec in CODECS}
    median = {codec: statistics.median(seconds) for codec, seconds in latency.items()}
    best = min(median["dense"], median["delta"])
    chosen = [step["auto"].sent_as for step in steps]
    return {
        "density": density,
        "latency_s": {
            codec: {"median": median[codec], "min": min(seconds), "max": max(seconds)}
            for codec, seconds in latency.items()
        },
        "delta_wire_bytes": round(statistics.median(step["delta"].wire_bytes for step in steps[warm:])),
        "best": "dense" if median["dense"] <= median["delta"] else "delta",
        "ratio_measured": median["auto"] / best,
        "ratio_by_choice": statistics.median(median[codec] for codec in chosen[warm:]) / best,
        "chosen": chosen,
        "left_out": warm,
        "reasons": [step["auto"].reason for step in steps],
        "verified": verified,
    }


def run(
    workload: Workload,
    *,
    engines: Sequence[str],
    densities: Sequence[float],
    receivers: int,
    warm: int,
    versions: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure every engine at every density."""
    with Processes(receivers, workload.flat_bytes) as processes, asyncio.Runner() as runner:
        processes.every("prepare", workload.to_plain(), 0, 1, timeout_s=timeout_s)
        rows = []
        try:
            for engine in engines:
                rows += measure_engine(
                    engine,
                    processes,
                    runner,
                    densities=densities,
                    warm=warm,
                    versions=versions,
                    timeout_s=timeout_s,
                    say=say,
                )
        except WeightlaneError as error:
            processes.raise_if_dead(error)
            raise
    return {
        "machine": this_machine().model_dump(),
        "date": datetime.now(UTC).date().isoformat(),
        "model": workload.name,
        "payload_bytes": workload.nbytes,
        "receivers": receivers,
        "versions": versions,
        "left_out": warm,
        "rows": rows,
        "worst_measured": max(row["ratio_measured"] for row in rows),
        "worst_by_choice": max(row["ratio_by_choice"] for row in rows),
        "verified": all(row["verified"] for row in rows),
    }


def text(report: dict[str, Any]) -> str:
    """The report as a table."""
    lines = [
        f"{report['model']}: {report['payload_bytes'] / 1e6:.1f} MB, receivers: {report['receivers']}, integrity off",
        f"medians of {report['versions']} versions, the first {report['left_out']} of each density left out",
        "engine  density  dense ms  delta ms   auto ms  best   auto chose            measured  by choice",
    ]
    for row in report["rows"]:
        seconds = row["latency_s"]
        counted = row["chosen"][row["left_out"] :]
        chose = ", ".join(f"{counted.count(codec)} {codec}" for codec in ("dense", "delta") if codec in counted)
        times = " ".join(f"{1e3 * seconds[codec]['median']:9.1f}" for codec in CODECS)
        mark = "  worse" if row["ratio_by_choice"] > AT_MOST else ""
        lines.append(
            f"{row['engine']:7} {row['density']:7g} {times}  {row['best']:6} {chose:20} {row['ratio_measured']:9.3f}"
            f"  {row['ratio_by_choice']:9.3f}{mark}{'' if row['verified'] else '  NOT VERIFIED'}"
        )
    lines.append(f"worst: measured {report['worst_measured']:.3f}, by choice {report['worst_by_choice']:.3f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON if asked to; 1 if any bit was wrong, 2 where it cannot run here."""
    parser = options_of(__doc__, model=MIDDLE, deadline_s=120.0)
    parser.add_argument("--engine", default="shm,gloo")
    parser.add_argument("--density", type=float, nargs="*", default=DENSITIES)
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--warm", type=int, default=4, help="versions of each density that are left out")
    parser.add_argument("--versions", type=int, default=9, help="versions of each density that count")
    options = parser.parse_args(arguments)
    if min(options.receivers, options.versions) < 1 or options.warm < 0:
        parser.error("--receivers and --versions must be positive, --warm not negative")
    return finish(
        "densities",
        lambda: run(
            workload_named(options.model),
            engines=options.engine.split(","),
            densities=options.density,
            receivers=options.receivers,
            warm=options.warm,
            versions=options.versions,
            timeout_s=options.deadline_s,
            say=say,
        ),
        text,
        options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
