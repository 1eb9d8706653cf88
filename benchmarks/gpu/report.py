"""The report of `make gpu`: as JSON, and as a Markdown table that goes between two markers of a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.command import table

from .running import PASSED, Result


def report_of(facts: Mapping[str, Any], date: str, parts: Sequence[str], results: Sequence[Result]) -> dict[str, Any]:
    """Everything that was found, as JSON. `facts` are those of `probe.look`, and `parts` what was asked for."""
    return {
        "date": date,
        "parts": list(parts),
        "machine": {
            key: facts.get(key, "") for key in ("devices", "driver", "torch", "cuda", "nccl", "python", "system")
        },
        "passed": bool(results) and all(result.outcome == PASSED for result in results),
        "steps": [asdict(result) for result in results],
    }


def markdown(report: Mapping[str, Any]) -> str:
    """The report as one table, with a line above it that says where it comes from."""
    machine = report["machine"]
    names = sorted({device["name"] for device in machine["devices"]})
    count = len(machine["devices"])
    where = f"{count} x {', '.join(names)}" if count > 1 else ", ".join(names) or "no GPU"
    ran = f"`make gpu PARTS={','.join(report['parts'])}`, {report['date']}: {where}"
    rows = []
    for step in report["steps"]:
        outcome = step["outcome"] + (f": {step['why']}" if step["why"] else "")
        figures = "; ".join(f"{name} {_number(value)}" for name, value in step["figures"].items())
        rows.append((step["name"], step["about"], f"`{step['command']}`", outcome, f"{step['seconds']:.0f}", figures))
    head = f"{ran}, driver {machine['driver'] or 'unknown'}, torch {machine['torch']}, CUDA {machine['cuda']}."
    return f"{head}\n\n{table(('step', 'what it shows', 'command', 'outcome', 'seconds', 'figures'), rows)}"


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
