"""Checks a trace against Google's "Trace Event Format", and gives its events by row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

KEYS = {"X": {"dur"}, "i": {"s"}, "C": {"args"}, "M": {"args"}}
METADATA = {"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"}


@dataclass(frozen=True)
class Span:
    name: str
    start: int
    end: int
    args: dict[str, Any]


@dataclass(frozen=True)
class Trace:
    events: list[dict[str, Any]]
    other: dict[str, Any]
    processes: dict[int, str]
    threads: dict[tuple[int, int], str]

    def spans(self, process: str, row: str) -> list[Span]:
        """The spans of one row (or of rows ``<row> 1``, ``<row> 2``, ...), by start."""
        threads = ((key, name) for key, name in self.threads.items() if self.processes[key[0]] == process)
        rows = {key for key, name in threads if row in (name, name.rpartition(" ")[0])}
        found = [
            Span(event["name"], event["ts"], event["ts"] + event["dur"], event["args"])
            for event in self.events
            if event["ph"] == "X" and (event["pid"], event["tid"]) in rows
        ]
        return sorted(found, key=lambda span: (span.start, -span.end))

    def named(self, phase: str) -> list[str]:
        return [event["name"] for event in self.events if event["ph"] == phase]


def load(path: Path) -> Trace:
    """Read a trace and hold it against the format."""

    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert document.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for event in events:
        assert {"name", "ph", "pid", "tid"} | KEYS[event["ph"]] <= event.keys(), event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in METADATA
            if event["name"] == "process_name":
                assert event["pid"] not in processes
                processes[event["pid"]] = event["args"]["name"]
            if event["name"] == "thread_name":
                threads[event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert event["ts"] >= 0
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    assert min(event["ts"] for event in events if "ts" in event) == 0, "times begin at the earliest event"
    assert {event["pid"] for event in events} == processes.keys(), "every process has a name"
    check_nesting(events, threads)
    return Trace(events, document["otherData"], processes, threads)


def check_nesting(events: list[dict[str, Any]], threads: dict[tuple[int, int], str]) -> None:
    """In one row a span lies inside another or beside it: viewers draw nonsense otherwise."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in threads, "every row has a name"
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for row, spans in rows.items():
        open_ends: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], (
                f"{threads[row]}: {start}..{end} overlaps one to {open_ends[-1]}"
            )
            open_ends.append(end)
