"""Builds the report of a run: one row per peer, with the ratio of its latency to that of the limit `memcpy-all`."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .peer import Peer
from .workload import Workload

_TIMES = ("trainer_blocked_s", "rollout_blocked_s", "latency_s")
YARDSTICK = "memcpy-all"
"""The limit that every row is held against, in the run that it comes from."""


def report_of(
    passes: int, receivers: int, workload: Workload, peers: Mapping[str, Peer], words: Mapping[str, Any]
) -> dict[str, Any]:
    """The report, as README.md describes it, of what the peers' processes said so far."""
    rows = [_row(peer, words[name]) for name, peer in peers.items() if words[name]]
    limit = next((row["latency_s"]["median"] for row in rows if row["name"] == YARDSTICK and "latency_s" in row), None)
    for row in rows:
        if limit is not None and "latency_s" in row:
            row["x_memcpy_all"] = round(row["latency_s"]["median"] / limit, 3)
    return {
        "benchmark": "peers",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "workload": {
            "name": workload.name,
            "payload_bytes": workload.nbytes,
            "tensors": len(workload.shapes),
            "receivers": receivers,
        },
        "passes": passes,
        "rows": rows,
    }


def merged(before: Mapping[str, Any], now: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """`now`, and those rows of an earlier report that were not measured again.

    Every row keeps its ratio to the limit of the run that it comes from; rows of different runs compare by that only.

    Args:
        before: The earlier report.
        now: The later one.
        order: Of the rows, by name.

    Raises:
        ValueError: The two are not of the same machine, workload and receivers.
    """
    for what in ("machine", "workload"):
        if before[what] != now[what]:
            raise ValueError(f"the earlier report is of another {what}: {before[what]}, now {now[what]}")
    rows = {row["name"]: row for row in [*before["rows"], *now["rows"]]}
    place = {name: position for position, name in enumerate(order)}
    return {**now, "rows": sorted(rows.values(), key=lambda row: place.get(row["name"], len(place)))}


def fastest_peers(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fastest peer's row by what it goes through: memory, network or files."""
    found: dict[str, dict[str, Any]] = {}
    for row in report["rows"]:
        if row["group"] == "peer" and "x_memcpy_all" in row and row["verified"]:
            best = found.setdefault(row["through"], row)
            if row["x_memcpy_all"] < best["x_memcpy_all"]:
                found[row["through"]] = row
    return found


def machine() -> dict[str, Any]:
    """Describe the hardware and software that the figures depend on, without anything that identifies the machine."""
    processor = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpus": os.cpu_count(),
        "cpu": processor,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads_per_process": 1,
    }


def _row(peer: Peer, words: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": peer.name, "group": peer.group, "through": peer.through, "what": peer.what}
    for word in words:
        for kind in ("unavailable", "failed"):
            if kind in word:
                return {**row, kind: word[kind]}
    measured = [word for word in words if "round" in word and not word["warm_up"]]
    clean = [word for word in measured if word["clean"]]
    counted = clean or measured
    return {
        **row,
        "versions": next(word["versions"] for word in words if "versions" in word),
        **{time_: _spread([word[time_] for word in counted]) for time_ in _TIMES},
        "first_round_s": next(word["latency_s"] for word in words if word.get("warm_up")),
        "setup_s": next(word["setup_s"] for word in words if "setup_s" in word),
        "rounds": len(counted),
        "disturbed_rounds": len(measured) - len(clean),
        "clean": bool(clean),
        "failed_turns": [word["failed_before"] for word in words if "failed_before" in word],
        "verified": all(word["verified"] for word in words if "round" in word),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 5),
        "min": round(min(values), 5),
        "max": round(max(values), 5),
    }
