"""Writes the tables and the picture of docs/performance.md from the newest committed result of each kind; other text stays.

    python -m benchmarks.figures

A result is the JSON of a benchmark, `benchmarks/results/MACHINE/NAME-DATE.json`. A table stands between two lines of the page,
``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from weightlane.cli.bench.report.bench_report import BenchReport

from .command import Report, put_into, table
from .commit import versions
from .gpu import report as gpu
from .peers import report as peers
from .sync import control_plane
from .training import async_against_sync, density, kills

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).resolve().parents[1] / "docs/performance.md"
PICTURE = PAGE.with_name("async-against-sync.svg")
COLUMNS = (
    "engine", "codec", "integrity", "changed", "trainer blocked, ms", "without a step, ms", "blocking sync, ms",
    "rollout blocked, ms", "x all copy", "latency, ms", "its limit, ms", "x limit", "wire", "extra GB: trainer, rollout",
)  # fmt: skip


def bench(reports: Sequence[Report]) -> str:
    """The rows of `weightlane bench` with the limits of their own runs, in milliseconds (medians) and ratios."""
    rows = []
    for plain in reports:
        report = BenchReport.model_validate(plain)
        for row in report.rows:
            trainer, rollout, latency = row.trainer_blocked_s, row.rollout_blocked_s, row.latency_s
            limit, copy = report.limit_s(row), report.limits.memcpy_all_receivers_s.median
            blocked = trainer, row.trainer_blocked_without_step_s, report.blocking.trainer_blocked_s
            cells = [row.engine, row.codec, row.integrity, f"{100 * row.density:g} %"]
            cells += [_ms(spread.median) for spread in blocked]
            cells += [_ms(rollout.median), f"{rollout.median / copy:.2f}", _ms(latency.median), _ms(limit)]
            cells += [f"{latency.median / limit:.2f}", f"{row.wire_bytes / row.payload_bytes:.2%}"]
            cells.append(f"{row.extra_bytes.trainer / 1e9:.2f}, {row.extra_bytes.rollout / 1e9:.2f}")
            rows.append(cells if row.verified else [*cells[:-1], "**NOT VERIFIED**"])
    return table(COLUMNS, rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if seconds < 1e-2 else f"{1e3 * seconds:.0f}"


TABLES: dict[str, Callable[[Report], str]] = {
    "async-against-sync": async_against_sync.markdown,
    "density": density.text,
    "kills": kills.markdown,
    "control-plane": control_plane.text,
    "peers": peers.text,
    "make gpu": gpu.markdown,
}
"""Makes the table of each name from its newest result."""


def page(text: str) -> str:
    """The page `text` with the tables of the committed results. Raises ValueError for a name without lines in the page."""
    made = {"bench": bench(results("bench-*"))}
    made["versions"] = "\n\n".join(versions.text(each).strip() for each in results("versions*"))
    for name, write in TABLES.items():
        found = results(name.removeprefix("make "))
        made[name] = write(found[-1]) if found else "Not measured yet.\n"
    for name, lines in made.items():
        text = put_into(text, name, lines)
    return text


def results(name: str) -> list[Report]:
    """The committed results of a name, oldest first."""
    dated = "-".join(["[0-9][0-9]*"] * 3)
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(f"*/{name}-{dated}.json"))]


def main() -> None:
    """Write the page, and draw its picture."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for report in results("async-against-sync")[-1:]:
        async_against_sync.draw(report, PICTURE)


if __name__ == "__main__":
    main()
