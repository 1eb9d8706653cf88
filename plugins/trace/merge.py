"""Merges the parts that a run's processes wrote into one trace.

``weightlane train`` does so at the end of a run. Other programs use ``python -m weightlane.plugins.trace.merge PATH``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .part import FULL, LAST, parts_dir


@dataclass(frozen=True, slots=True)
class MergedTrace:
    """A merged trace."""

    path: Path
    events: int
    """Number of events without metadata."""
    processes: int
    incomplete: tuple[str, ...]
    """Names of the processes that reached their limit. Their later events are missing."""


@dataclass(frozen=True, slots=True)
class _Process:
    part: Path
    number: int
    name: str
    incomplete: bool


def claim(trace: Path) -> Path:
    """Return a free path for a new trace: `trace`, or `trace` with a number if an earlier trace exists.

    Parts that a killed run left behind are merged first.
    """
    number, free = 1, trace
    while free.exists() or (parts_dir(free).exists() and merge(free) is not None):
        number += 1
        free = trace.with_name(f"{trace.stem}-{number}{trace.suffix}")
    return free


def merge(trace: Path) -> MergedTrace | None:
    """Write `trace` from its parts and remove them. Returns None, and writes no file, if there is no event.

    The file is a JSON object with ``traceEvents``. Times are microseconds since the earliest event, whose time is in
    ``otherData``. The file appears complete or not at all. Raises `OSError`.
    """
    directory = parts_dir(trace)
    parts = sorted(directory.glob("*.jsonl"))
    processes, origin, events = _scan(parts)
    if events:
        partial = trace.with_name(f".{trace.name}.partial")
        try:
            with partial.open("w", encoding="utf-8") as file:
                _write(file, processes, origin)
            partial.replace(trace)
        finally:
            partial.unlink(missing_ok=True)
    for part in parts:
        part.unlink(missing_ok=True)
    if directory.exists() and not any(directory.iterdir()):
        directory.rmdir()
    incomplete = tuple(process.name for process in processes if process.incomplete)
    return MergedTrace(trace, events, len(processes), incomplete) if events else None


def _scan(parts: Sequence[Path]) -> tuple[list[_Process], int, int]:
    """Return the processes in display order, the earliest time in microseconds, and the number of events."""
    found: list[tuple[int, str, Path, bool]] = []
    origin, events = sys.maxsize, 0
    for part in parts:
        name, order, incomplete, count = part.stem, LAST, False, 0
        for event in _events(part):
            if event["name"] == "process_name":
                name = event["args"]["name"]
            elif event["name"] == "process_sort_index":
                order = min(order, event["args"]["sort_index"])
            elif event["ph"] != "M":
                count += 1
                origin = min(origin, event["ts"])
                incomplete = incomplete or event["name"] == FULL
        if count:
            found.append((order, name, part, incomplete))
            events += count
    found.sort(key=lambda item: item[:2])
    return [_Process(item[2], number, item[1], item[3]) for number, item in enumerate(found, 1)], origin, events


def _write(file: IO[str], processes: Sequence[_Process], origin: int) -> None:
    started = {"started_unix_s": origin / 1e6}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(started)}, "traceEvents": [')
    separator = "\n"
    for process in processes:
        for event in _numbered(process, origin):
            file.write(separator + json.dumps(event))
            separator = ",\n"
    file.write("\n]}\n")


def _numbered(process: _Process, origin: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a part. Process numbers replace the system's process ids, which two hosts may share."""
    for name, value in (("process_name", process.name), ("process_sort_index", process.number)):
        key = name.removeprefix("process_")
        yield {"ph": "M", "name": name, "pid": process.number, "tid": 0, "args": {key: value}}
    for event in _events(process.part):
        if event["name"] in ("process_name", "process_sort_index"):
            continue
        event["pid"] = process.number
        if "ts" in event:
            event["ts"] -= origin
        yield event


def _events(part: Path) -> Iterator[dict[str, Any]]:
    with part.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return  # the process was killed while it wrote its last line


def main() -> int:
    """Usage: python -m weightlane.plugins.trace.merge PATH."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):  # noqa: PLR2004 - the program and its argument
        sys.stderr.write(f"{main.__doc__}\n")
        return 2
    merged = merge(Path(sys.argv[1]))
    if merged is None:
        sys.stderr.write(f"error: there are no parts of a trace in {parts_dir(Path(sys.argv[1]))}\n")
        return 1
    sys.stdout.write(f"{merged.path}: {merged.events} events of {merged.processes} processes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
