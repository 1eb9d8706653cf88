"""The report of a run: one row per peer, with its latency as a multiple of the limit `memcpy-all`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.command import Report, shown, spread, table

from .catalogue import Peer

TIMES = ("trainer_blocked_s", "rollout_blocked_s", "latency_s")
YARDSTICK = "memcpy-all"
COLUMNS = (
    "", "through", "latency, s", "x memcpy-all", "x fastest peer", "trainer blocked", "rollout blocked", "first round", "rounds",
)  # fmt: skip


def rows_of(peers: Mapping[str, Peer], answers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of what was found of each peer: its ``rounds``, and ``unavailable`` or ``failed`` with the reason."""
    rows = [_row(peers[name], found) for name, found in answers.items()]
    limit = next((row["latency_s"]["median"] for row in rows if row["name"] == YARDSTICK and "latency_s" in row), None)
    for row in rows:
        if limit is not None and "latency_s" in row:
            row["x_memcpy_all"] = round(row["latency_s"]["median"] / limit, 3)
    return rows


def _row(peer: Peer, found: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": peer.name, "group": peer.group, "through": peer.through, "what": peer.what}
    row |= {kind: found[kind] for kind in ("unavailable", "failed") if kind in found}
    rounds = found["rounds"]
    counted = [each for each in rounds if not each["warm_up"]]
    if not counted or "failed" in row:
        return row
    return {
        **row,
        "versions": peer.versions(),
        **{figure: spread(each[figure] for each in counted) for figure in TIMES},
        "first_round_s": rounds[0]["latency_s"],
        "rounds": len(counted),
        "verified": all(each["verified"] for each in rounds),
    }


def fastest_peers(report: Report) -> dict[str, dict[str, Any]]:
    """The fastest peer's row by what it goes through: memory, network or files."""
    found: dict[str, dict[str, Any]] = {}
    for row in report["rows"]:
        if row["group"] == "peer" and "x_memcpy_all" in row and row["verified"]:
            best = found.setdefault(row["through"], row)
            if row["x_memcpy_all"] < best["x_memcpy_all"]:
                found[row["through"]] = row
    return found


def text(report: Report) -> str:
    """One table of all rows, fastest first within its group. What did not run says why, at the end."""
    order, fastest, lines = {"limit": 0, "weightlane": 1, "peer": 2}, fastest_peers(report), []
    ran = [row for row in report["rows"] if "latency_s" in row]
    for row in sorted(ran, key=lambda row: (order[row["group"]], row["latency_s"]["median"])):
        best = fastest.get(row["through"]) if row["group"] == "weightlane" and "x_memcpy_all" in row else None
        times = [f"{row[figure]['median']:.2g}" for figure in ("trainer_blocked_s", "rollout_blocked_s")]
        of_limit = f"{row['x_memcpy_all']:.1f}" if "x_memcpy_all" in row else ""
        of_best = f"{row['x_memcpy_all'] / best['x_memcpy_all']:.2f} ({best['name']})" if best else ""
        rounds = f"{row['rounds']}{'' if row['verified'] else ' **WRONG VALUES**'}"
        cells = (shown(row["latency_s"]), of_limit, of_best, *times, f"{row['first_round_s']:.2f}", rounds)
        lines.append((row["name"], row["through"], *cells))
    for row in report["rows"]:
        for kind, words in (("unavailable", "cannot run here"), ("failed", "failed")):
            if reason := row.get(kind):
                lines.append((row["name"], row["through"], f"{words}: {reason}".replace("\n", " "), *[""] * 6))
    return table(COLUMNS, lines)
