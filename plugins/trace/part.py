"""The part of a trace that one process writes: a file with one JSON event per line."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..hooks import Facts

FULL = "trace full: later events of this process are missing"
"""Name of the mark that is written at the limit."""

DRIVER = "driver"
_ROLES = {DRIVER: 0, "trainer": 1, "rollout": 2}
"""Display order of the processes' roles."""
LAST = 9
"""Display order of processes of any other role."""
_SLACK_US = 2_000
"""Overlap, in microseconds, up to which two events of a `parallel` track count as successive: a hook is called a moment after
its event ended."""


def parts_dir(trace: Path) -> Path:
    """Return the directory in which the processes of a run keep their parts of `trace`."""
    return trace.with_name(f"{trace.name}.parts")


def now_us() -> int:
    """Return the wall clock in microseconds."""
    return time.time_ns() // 1000


def as_us(facts: Facts, key: str) -> int:
    """Return the seconds in ``facts[key]`` as microseconds; 0 if there are none."""
    return int(1e6 * facts.get(key, 0.0))


def _json(event: dict[str, Any]) -> bytes:
    try:
        return json.dumps(event, default=str, allow_nan=False).encode() + b"\n"
    except ValueError:
        return json.dumps(finite(event), default=str).encode() + b"\n"


def finite(value: Any) -> Any:
    """Return `value` with NaN and infinities, such as the loss of a diverged run, as text: JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Part:
    """The part file of one process, and the tracks of its spans."""

    def __init__(self, trace: Path, limit_bytes: int) -> None:
        self._trace = trace
        self._limit_bytes = limit_bytes
        self.lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._file: int | None = None
        self._written = 0
        self._full = False
        self._participants: dict[str, None] = {}
        self._tracks: dict[tuple[str, str], Track] = {}
        self._threads = 0

    def track(self, role: str, participant: str, name: str, *, parallel: bool = False) -> Track:
        """Return the track called `name` of a participant of this process."""
        with self.lock:
            if self._pid != os.getpid():  # a forked child must not write into its parent's part
                self._reset()
            track = self._tracks.get((participant, name))
            if track is None:
                if participant not in self._participants:
                    self._participants[participant] = None
                    names = ", ".join(self._participants)
                    self.write({"ph": "M", "name": "process_name", "args": {"name": names}})
                    self.write(
                        {"ph": "M", "name": "process_sort_index", "args": {"sort_index": _ROLES.get(role, LAST)}}
                    )
                    label = f"pid {self._pid} on {socket.gethostname()}"
                    self.write({"ph": "M", "name": "process_labels", "args": {"labels": label}})
                alone = participant == next(iter(self._participants))
                track = Track(self, name if alone else f"{participant} {name}", parallel=parallel)
                self._tracks[participant, name] = track
            return track

    def new_thread(self, name: str) -> int:
        """Return the "thread id" of a new row in the display."""
        self._threads += 1
        self.write({"ph": "M", "name": "thread_name", "tid": self._threads, "args": {"name": name}})
        order = {"sort_index": self._threads}
        self.write({"ph": "M", "name": "thread_sort_index", "tid": self._threads, "args": order})
        return self._threads

    def write(self, event: dict[str, Any]) -> None:
        """Append an event, unless the part is full."""
        if self._full:
            return
        event = {"pid": self._pid, "tid": 0, **event}
        line = _json(event)
        if self._written + len(line) > self._limit_bytes:
            self._full = True
            line = _json(
                {"ph": "i", "s": "p", "name": FULL, "cat": "trace", "pid": self._pid, "tid": 0, "ts": now_us()}
            )
        if self._file is None:
            directory = parts_dir(self._trace)
            directory.mkdir(parents=True, exist_ok=True)
            name = f"{socket.gethostname()}-{self._pid}-{time.time_ns()}.jsonl"
            self._file = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.write(self._file, line)
        self._written += len(line)

    def __del__(self) -> None:
        if self._file is not None and self._pid == os.getpid():
            os.close(self._file)


class Track:
    """Successive spans in one row of the display. A `parallel` track has more rows where spans overlap."""

    def __init__(self, part: Part, name: str, *, parallel: bool) -> None:
        self._part = part
        self._name = name
        self._parallel = parallel
        self._rows: list[tuple[int, int]] = []
        """Thread id of each row, and when its last span ended."""
        self._row = 0

    def took(self, name: str, facts: Facts, **more: Any) -> None:
        """Write a span that ends now and took ``facts["seconds"]``."""
        end = now_us()
        self.span(name, end - as_us(facts, "seconds"), end, facts, **more)

    def span(self, name: str, start: int, end: int, facts: Facts, **more: Any) -> int:
        """Write a span and return its start, which is moved to the end of the previous span in its row if that is later."""
        with self._part.lock:
            start = self._place(start, end)
            self._complete(name, start, end, {**facts, **more})
        return start

    def inside(self, name: str, start: int, end: int) -> None:
        """Write a span within the last one."""
        with self._part.lock:
            self._complete(name, start, max(start, end), {})

    def mark(self, name: str, facts: Facts) -> None:
        """Write a mark at this moment."""
        with self._part.lock:
            self._place(now := now_us(), now)
            self._part.write(self._event("i", name, now, {"s": "g", "args": dict(facts)}))

    def curve(self, name: str, at: int, values: dict[str, Any]) -> None:
        """Write a point of one or more curves."""
        with self._part.lock:
            self._part.write(self._event("C", name, at, {"args": values}))

    def _complete(self, name: str, start: int, end: int, facts: dict[str, Any]) -> None:
        self._part.write(self._event("X", name, start, {"dur": end - start, "args": facts}))

    def _event(self, phase: str, name: str, at: int, more: dict[str, Any]) -> dict[str, Any]:
        return {"ph": phase, "name": name, "cat": self._name, "ts": at, "tid": self._rows[self._row][0], **more}

    def _place(self, start: int, end: int) -> int:
        slack = _SLACK_US if self._parallel else end - start
        fits = (row for row, (_, last) in enumerate(self._rows) if start + min(slack, end - start) >= last)
        self._row = next(fits, -1)
        if self._row < 0:
            if self._parallel or not self._rows:
                number = f" {len(self._rows) + 1}" if self._parallel else ""
                self._rows.append((self._part.new_thread(self._name + number), 0))
            self._row = len(self._rows) - 1
        thread, last = self._rows[self._row]
        start = max(start, min(last, end))
        self._rows[self._row] = (thread, max(last, end))
        return start
