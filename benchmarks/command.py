"""Parts of all benchmarks: options, one form of results, tables, and how a command ends."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Report = dict[str, Any]
"""Findings of a benchmark: its settings, ``rows``, and ``verified``, whether every bit was right. `finish` adds the rest."""


def say(what: str) -> None:
    """Report progress on standard error."""
    print(what, file=sys.stderr, flush=True)


def options_of(
    about: str | None, *, rounds: int = 0, deadline_s: float = 0.0, device: str = ""
) -> argparse.ArgumentParser:
    """A parser that takes --json, and --rounds, --deadline-s (of any single operation) and --device where a default is given.

    `about` is the benchmark's docstring, for --help.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds)
    if deadline_s:
        parser.add_argument("--deadline-s", type=float, default=deadline_s, help="of any single operation")
    if device:
        parser.add_argument("--device", default=device, choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    return parser


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least and most of some values."""
    found = list(values)
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def shown(values: dict[str, float], scale: float = 1.0, digits: int = 3) -> str:
    """A `spread` as text: ``median (least to most)``, in as many significant digits."""
    median, least, most = (f"{scale * values[name]:.{digits}g}" for name in ("median", "min", "max"))
    return f"{median} ({least} to {most})"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, on the page and in the terminal alike."""
    cells = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in cells) + "\n"


def put_into(document: str, name: str, made: str) -> str:
    """The text `document` with a table between the lines for `name`. Raises ValueError when it lacks them."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, began, rest = document.partition(begin)
    _, ended, after = rest.partition(end)
    if not began or not ended:
        raise ValueError(f"the document lacks the lines {begin} and {end}, between which the table goes")
    return f"{before}{begin}\n{made}{end}{after}"


def as_figures(report: Report) -> str:
    """The ``figures`` of a report that has no rows, as JSON."""
    return json.dumps(report["figures"], indent=1) + "\n"


def finish(
    name: str, measure: Callable[[], Report], text: Callable[[Report], str], to: Path | None, device: str = "cpu"
) -> int:
    """Measure by `measure`, print the report as the table that `text` makes of it, and write it as JSON to `to`, if given.

    `name` is that of the benchmark, and `device` the one whose name belongs to the machine. Returns the exit code: 1 when any bit
    was wrong, or the report says that an aim was not ``met``; 2 where it cannot run here.
    """
    from weightlane.ckpt_engines import WeightlaneError  # not above: `make gpu` runs where it is not installed
    from weightlane.cli.bench.report.machine import this_machine

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is ended
    try:
        found = measure()
    except WeightlaneError as error:
        say(f"{name}: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    date, machine = datetime.now(UTC).date().isoformat(), this_machine(device).model_dump()
    report = {"benchmark": name, "date": date, "machine": machine, **found}
    print(text(report) + ("" if report["verified"] else "NOT VERIFIED: not every bit was right"))
    if to is not None:
        to.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if report["verified"] and report.get("met", True) else 1
