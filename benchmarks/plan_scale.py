"""Measures what transfer planning costs at scale.

    python -m benchmarks.plan_scale [--case NAME] [--rounds 3] [--json FILE] [--markdown]

Synthetic placements of large models (`weightlane.sync.plan.shapes`), the real planner, one core. Each case runs in a
process of its own, whose peak memory is the largest resident set, torch and the placements included. No weights, no transfer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from typing import Any

import torch

from benchmarks.command import Report, case_in_own_process, finish, options_of, say
from weightlane.sync.config import Relay
from weightlane.sync.plan import plan_transfer
from weightlane.sync.plan.plan_report import plan_report
from weightlane.sync.plan.send_assignment import assign_slices
from weightlane.sync.plan.shapes.model_shapes import Wire, shape_named, weights
from weightlane.sync.plan.shapes.parallel_layouts import RolloutLayout, TrainerLayout
from weightlane.sync.version.placement import Placement

CASES: dict[str, tuple[str, str, str, Wire, Relay]] = {
    "1t": ("1t", "pp8 ep32", "8x tp16 ep16", "bf16", "off"),
    "1t-fp8": ("1t", "pp8 ep32", "8x tp16 ep16", "fp8", "off"),
    "1t-64-replicas": ("1t", "pp8 ep32", "64x tp16 ep16", "bf16", "chain"),
    "235b": ("235b", "pp4 tp4 ep8 dp2", "4x tp8 ep8", "bf16", "off"),
    "235b-fsdp": ("235b", "fsdp64", "8x tp8", "bf16", "off"),
    "235b-relayed": ("235b", "pp4 tp4 ep8 dp2", "16x tp8 ep8", "bf16", "chain"),
    "30b": ("30b", "fsdp32", "8x tp2", "bf16", "off"),
    "30b-fp8": ("30b", "pp2 tp2 ep8", "8x tp2", "fp8", "off"),
}
"""Shape, trainer, rollout, type on the wire, and how receivers relay."""
MOST_S = 5.0
MOST_MIB = 1024.0
"""Targets for planning the first case, `1t`: seconds of its fastest round, and peak memory of its process in MiB."""
_TIMEOUT_S = 300.0


def measure_case(name: str, rounds: int) -> dict[str, Any]:
    """Plan a case so often, here, and explain the plan."""
    shape_name, trainer, rollout, wire, relay = CASES[name]
    shape = shape_named(shape_name)
    tensors = weights(shape, wire)
    held = TrainerLayout.parse(trainer).placements(shape, tensors)
    needed = RolloutLayout.parse(rollout).placements(shape, tensors)
    before_mib = _peak_mib()
    wall_s, cpu_s, digests = [], [], set()
    for _ in range(rounds):
        # What another process parsed is no object of this one: nothing is left of the round before.
        fresh_held, fresh_needed = _again(held), _again(needed)
        began, ran = time.perf_counter(), time.process_time()
        plan = plan_transfer(assign_slices(fresh_held), fresh_needed)
        wall_s.append(time.perf_counter() - began)
        cpu_s.append(time.process_time() - ran)
        digests.add(plan.digest)
    peak_mib = _peak_mib()
    report = plan_report(assign_slices(held), needed, relay=relay, links=0)
    return {
        "case": name,
        "shape": shape.name,
        "trainer": trainer,
        "rollout": rollout,
        "wire": wire,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "peak_mib": peak_mib,
        "before_planning_mib": before_mib,
        "verified": digests == {report["digest"]} and report["crossing_bytes"] == report["minimum_bytes"],
        **report,
    }


def _again(placements: dict[str, Placement]) -> dict[str, Placement]:
    """The same placements in other objects, but one for all ranks that shared one."""
    copies = {id(each): Placement(each.specs, each.boxes) for each in placements.values()}
    return {name: copies[id(each)] for name, each in placements.items()}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(cases: list[str], rounds: int) -> Report:
    """Every case in a process of its own, one after the other."""
    rows = []
    for case in cases:
        say(f"planning {case}")
        rows.append(case_in_own_process("plan_scale", case, ["--rounds", str(rounds)], _TIMEOUT_S))
    machine = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return {"machine": machine, "rounds": rounds, "rows": rows, "verified": all(row["verified"] for row in rows)}


_COLUMNS = (
    "model", "trainer to rollout", "ranks", "wire", "tensors", "cells", "lanes", "planning s (cpu)", "peak MiB", "GB per replica",
    "busiest sender",
)  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    relayed = row["relayed_lanes"]
    return [
        row["shape"],
        f"{row['trainer']} to {row['rollout']}",
        f"{row['trainer_ranks']} to {row['rollout_ranks']}",
        row["wire"],
        str(row["tensors"]),
        str(row["cells"]),
        f"{row['lanes']}{f' ({relayed} relayed)' if relayed else ''}",
        f"{min(row['wall_s']):.2f} ({min(row['cpu_s']):.2f})",
        f"{row['peak_mib']:.0f}",
        f"{max(row['replicas'].values()) / 1e9:.0f}",
        f"{row['busiest_sender']['over_mean']:.3f}",
    ]


def markdown(report: Report) -> str:
    """The table, as docs/performance.md has it."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    return "\n".join([*lines, *(f"| {' | '.join(cells(row))} |" for row in report["rows"])])


def text(report: Report) -> str:
    """The table in columns."""
    rows = [list(_COLUMNS), *map(cells, report["rows"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    first = report["rows"][0]
    if first["case"] == "1t":
        met = min(first["wall_s"]) <= MOST_S and first["peak_mib"] <= MOST_MIB
        lines.append(f"aim for the first: {MOST_S:g} s and {MOST_MIB:g} MiB: {'met' if met else 'MISSED'}")
    if not report["verified"]:
        lines.append("NOT VERIFIED: rounds gave different plans, or more crossed than is needed")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON if asked to."""
    parser = options_of(__doc__, rounds=3)
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this one; repeatable")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--here", choices=list(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        print(json.dumps(measure_case(options.here, options.rounds)))
        return 0
    return finish(
        "plan_scale",
        lambda: run(options.case or list(CASES), options.rounds),
        markdown if options.markdown else text,
        options.json,
    )


if __name__ == "__main__":
    raise SystemExit(main())
