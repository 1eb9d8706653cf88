"""A report as a table to read."""

from __future__ import annotations

from typing import Any


def markdown(report: dict[str, Any]) -> str:
    """One table of all rows, fastest first within its group, in GitHub's Markdown. What did not run says why, at the end."""
    workload, machine = report["workload"], report["machine"]
    ran = [row for row in report["rows"] if "latency_s" in row]
    yardstick = next((row["latency_s"]["median"] for row in ran if row["name"] == "memcpy-all"), None)
    title = (
        f"{workload['name']}: {workload['payload_bytes'] / 1e9:.3g} GB of bfloat16 in {workload['tensors']} tensors, one"
        f" sender, {workload['receivers']} receivers; {machine['cpus']} CPU cores, {machine['memory_gib']:.0f} GiB, torch"
        f" {machine['torch']}; {report['date']}. Seconds, median (lowest to highest)."
    )
    lines = [
        title,
        "",
        "| | latency | x memcpy-all | trainer blocked | rollout blocked | first round | rounds | verified | versions |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    order = {"limit": 0, "weightlane": 1, "peer": 2}
    for row in sorted(ran, key=lambda row: (order[row["group"]], row["latency_s"]["median"])):
        ratio = f"{row['latency_s']['median'] / yardstick:.1f}" if yardstick else ""
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        rounds = f"{row['rounds']}" + ("" if row["clean"] else " (disturbed)")
        lines.append(
            f"| {row['name']} | {_spread(row['latency_s'])} | {ratio} | {_median(row['trainer_blocked_s'])} |"
            f" {_median(row['rollout_blocked_s'])} | {row['first_round_s']:.2f} | {rounds} |"
            f" {'yes' if row['verified'] else '**no**'} | {versions} |"
        )
    for row in report["rows"]:
        if reason := row.get("unavailable"):
            lines.append(f"| {row['name']} | cannot run here: {_cell(reason)} | | | | | | | |")
        elif reason := row.get("failed"):
            lines.append(f"| {row['name']} | failed: {_cell(reason)} | | | | | | | |")
    return "\n".join(lines) + "\n"


def _spread(times: dict[str, float]) -> str:
    return f"{times['median']:.3g} ({times['min']:.3g} to {times['max']:.3g})"


def _median(times: dict[str, float]) -> str:
    return f"{times['median']:.2g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
