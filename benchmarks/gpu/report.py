"""The report of `make gpu`: as JSON, and as a Markdown table that goes between two markers of a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .running import PASSED, Result

BEGIN, END = "<!-- make gpu: begin -->", "<!-- make gpu: end -->"


def report_of(facts: Mapping[str, Any], date: str, parts: Sequence[str], results: Sequence[Result]) -> dict[str, Any]:
    """Everything that was found, as JSON.

    Args:
        facts: As `probe.look` gives them.
        date: ISO 8601.
        parts: What was asked for.
        results: What became of every step.
    """
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
    lines = [
        f"{ran}, driver {machine['driver'] or 'unknown'}, torch {machine['torch']}, CUDA {machine['cuda']}.",
        "",
        "| step | what it shows | command | outcome | seconds | figures |",
        "|---|---|---|---|---|---|",
    ]
    for step in report["steps"]:
        outcome = step["outcome"] + (f": {step['why']}" if step["why"] else "")
        figures = "; ".join(f"{name} {_number(value)}" for name, value in step["figures"].items())
        cells = (step["name"], step["about"], f"`{step['command']}`", outcome, f"{step['seconds']:.0f}", figures)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def put_into(document: Path, table: str) -> None:
    """Replace what stands between the markers of `document`. Raises ValueError when it lacks them."""
    text = document.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document.name} lacks the lines {BEGIN} and {END}, between which the table goes")
    document.write_text(f"{before}{BEGIN}\n{table}{END}{after}", encoding="utf-8")


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
