"""A report as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from .report import PHASES, BenchReport, Row, Spread


def report_tables(report: BenchReport) -> Iterator[RenderableType]:
    """What to print, in order."""
    setup, limits, blocking = report.setup, report.limits, report.blocking
    yield (
        f"{escape(setup.model)}: {setup.tensors} tensors, {setup.payload_bytes / 1e6:.1f} MB; {setup.receivers} receivers;"
        f" {setup.rounds} rounds; medians in ms"
    )
    yield _rows(report)
    if report.unavailable:
        yield unavailable_table(report.unavailable)
    yield _phases(report)
    floor = Table("limits, and the way that stops both sides", "ms", "min", "max")
    floor.add_row("one copy of the payload", *_three(limits.memcpy_s))
    floor.add_row("every receiver copies it at once", *_three(limits.memcpy_all_receivers_s))
    floor.add_row("copy into shared memory, then all copy out", *_three(limits.copy_in_then_out_s))
    floor.add_row("blocking: trainer stopped", *_three(blocking.trainer_blocked_s))
    floor.add_row("blocking: rollout stopped", *_three(blocking.rollout_blocked_s))
    yield floor
    yield from (f"[yellow]note:[/yellow] {escape(note)}" for note in report.notes)


def unavailable_table(reasons: Mapping[str, str]) -> Table:
    """Engines that cannot run here, and why."""
    table = Table("engine", "cannot run here")
    for engine, reason in reasons.items():
        table.add_row(escape(engine), escape(reason))
    return table


def _rows(report: BenchReport) -> Table:
    table = Table(
        "engine", "codec", "integrity", "trainer\nblocked", "(no step\nbetween)", "rollout\nblocked", "x one copy\neach",
        "latency", "x its\nlimit", "wire", "extra trainer,\nrollout (MB)", "loops: train,\ndecode", "verified",
    )  # fmt: skip
    for row in report.rows:
        table.add_row(
            row.engine,
            row.codec,
            row.integrity,
            _ms(row.trainer_blocked_s),
            _ms(row.trainer_blocked_without_step_s),
            _ms(row.rollout_blocked_s),
            _ratio(row.rollout_blocked_s.median, report.limits.memcpy_all_receivers_s.median),
            _ms(row.latency_s),
            _ratio(row.latency_s.median, report.limit_s(row)),
            f"{100 * row.wire_bytes / row.payload_bytes:.1f} %",
            f"{row.extra_bytes.trainer / 1e6:.1f}, {row.extra_bytes.rollout / 1e6:.1f}",
            _slowdown(row),
            "[green]yes[/green]" if row.verified else "[bold red]NO[/bold red]",
        )
    return table


def _phases(report: BenchReport) -> Table:
    table = Table("of the latency", *PHASES)
    for row in report.rows:
        table.add_row(row.name, *(_ms(getattr(row.phases, name)) for name in PHASES))
    return table


def _slowdown(row: Row) -> str:
    return "" if row.slowdown is None else f"{row.slowdown.trainer:.2f}, {row.slowdown.decode:.2f}"


def _three(spread: Spread) -> tuple[str, str, str]:
    return _ms(spread), f"{1e3 * spread.min:.2f}", f"{1e3 * spread.max:.2f}"


def _ms(spread: Spread) -> str:
    return f"{1e3 * spread.median:.2f}"


def _ratio(value: float, of: float) -> str:
    return f"{value / of:.2f}" if of > 0 else "-"
