"""A report as a table to read."""

from __future__ import annotations

from typing import Any

from .report import fastest_peers

_COLUMNS = (
    "", "through", "latency", "x memcpy-all", "x fastest peer", "trainer blocked", "rollout blocked", "first round", "rounds",
    "verified", "versions",
)  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    """One table of all rows, fastest first within its group, in GitHub's Markdown. What did not run says why, at the end."""
    workload, machine = report["workload"], report["machine"]
    ran = [row for row in report["rows"] if "latency_s" in row]
    fastest = fastest_peers(report)
    title = (
        f"{workload['name']}: {workload['payload_bytes'] / 1e9:.3g} GB of bfloat16 in {workload['tensors']} tensors, one"
        f" sender, {workload['receivers']} receivers; {machine['cpus']} CPU cores, {machine['memory_gib']:.0f} GiB, torch"
        f" {machine['torch']}; {report['date']}. Seconds, median (lowest to highest)."
    )
    lines = [title, "", _line(*_COLUMNS), "|" + "---|" * len(_COLUMNS)]
    order = {"limit": 0, "weightlane": 1, "peer": 2}
    for row in sorted(ran, key=lambda row: (order[row["group"]], row["latency_s"]["median"])):
        best = fastest.get(row["through"]) if row["group"] == "weightlane" and "x_memcpy_all" in row else None
        lines.append(
            _line(
                row["name"],
                row["through"],
                _spread(row["latency_s"]),
                f"{row['x_memcpy_all']:.1f}" if "x_memcpy_all" in row else "",
                f"{row['x_memcpy_all'] / best['x_memcpy_all']:.2f} ({best['name']})" if best else "",
                _median(row["trainer_blocked_s"]),
                _median(row["rollout_blocked_s"]),
                f"{row['first_round_s']:.2f}",
                _rounds(row),
                "yes" if row["verified"] else "**no**",
                ", ".join(f"{name} {version}" for name, version in row["versions"].items()),
            )
        )
    for row in report["rows"]:
        for kind, words in (("unavailable", "cannot run here"), ("failed", "failed")):
            if reason := row.get(kind):
                rest = [""] * (len(_COLUMNS) - 3)
                lines.append(_line(row["name"], row["through"], f"{words}: {_cell(reason)}", *rest))
    return "\n".join(lines) + "\n"


def _rounds(row: dict[str, Any]) -> str:
    beside = [] if row["clean"] else ["disturbed"]
    if failed := row["failed_turns"]:
        beside.append(f"a turn failed and was repeated: {_cell(failed[0])}")
    return f"{row['rounds']}" + (f" ({'; '.join(beside)})" if beside else "")


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(times: dict[str, float]) -> str:
    return f"{times['median']:.3g} ({times['min']:.3g} to {times['max']:.3g})"


def _median(times: dict[str, float]) -> str:
    return f"{times['median']:.2g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
