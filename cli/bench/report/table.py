"""A benchmark's report as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Column, Table

from .bench_report import PHASES, BenchReport, Spread


def report_tables(report: BenchReport) -> Iterator[RenderableType]:
    """Yield the parts of the report in the order in which they are printed."""
    setup, limits, blocking = report.setup, report.limits, report.blocking
    yield (
        f"{escape(setup.model)}: {setup.tensors} tensors, {setup.payload_bytes / 1e6:.1f} MB; {setup.receivers} receivers;"
        f" {setup.rounds} rounds; medians in ms"
    )
    yield _rows(report)
    if report.unavailable:
        yield unavailable_table(report.unavailable)
    yield _phases(report)
    yield _costs(report)
    if any(row.fit is not None for row in report.rows):
        yield _fits(report)
    floor = _table("limits, and a blocking sync", ("ms", "min", "max"))
    floor.add_row("one copy of the payload", *_cells(limits.memcpy_s))
    floor.add_row("every receiver copies it at once", *_cells(limits.memcpy_all_receivers_s))
    floor.add_row("copy into shared memory, then all copy out", *_cells(limits.copy_in_then_out_s))
    floor.add_row("blocking sync: trainer stops", *_cells(blocking.trainer_blocked_s))
    floor.add_row("blocking sync: rollout stops", *_cells(blocking.rollout_blocked_s))
    yield floor
    yield from (f"[yellow]note:[/yellow] {escape(note)}" for note in report.notes)


def unavailable_table(reasons: Mapping[str, str]) -> Table:
    """Return a table of the engines that cannot run here, with the reasons."""
    table = Table("engine", "cannot run here")
    for engine, reason in reasons.items():
        table.add_row(escape(engine), escape(reason))
    return table


def _rows(report: BenchReport) -> Table:
    columns = (
        "trainer\nstops",
        "without\na step",
        "rollout\nstops",
        "x one\ncopy",
        "latency",
        "x its\nlimit",
        "bits\nequal",
    )
    table = _table("", columns)
    for row in report.rows:
        table.add_row(
            escape(row.name),
            _ms(row.trainer_blocked_s),
            _ms(row.trainer_blocked_without_step_s),
            _ms(row.rollout_blocked_s),
            _ratio(row.rollout_blocked_s.median, report.limits.memcpy_all_receivers_s.median),
            _ms(row.latency_s),
            _ratio(row.latency_s.median, report.limit_s(row)),
            "[green]yes[/green]" if row.verified else "[bold red]NO[/bold red]",
        )
    return table


def _costs(report: BenchReport) -> Table:
    columns = ("wire", "trainer\n+ MB", "rollout\n+ MB", "training\nspeed", "decoding\nspeed")
    table = _table("", columns)
    for row in report.rows:
        slowdown = ("", "") if row.slowdown is None else (f"{row.slowdown.trainer:.2f}", f"{row.slowdown.decode:.2f}")
        extra = row.extra_bytes
        wire = f"{100 * row.wire_bytes / row.payload_bytes:.2f} %"
        table.add_row(escape(row.name), wire, f"{extra.trainer / 1e6:.1f}", f"{extra.rollout / 1e6:.1f}", *slowdown)
    return table


def _fits(report: BenchReport) -> Table:
    table = _table("latency, fitted", ("fixed", "+ bytes at\nGB/s", "MB", "measured"))
    for row in report.rows:
        if (fit := row.fit) is not None:
            bandwidth = "-" if fit.bytes_per_s is None else f"{fit.bytes_per_s / 1e9:.2f}"
            sizes, times = (f"{each / 1e6:.0f}" for each in fit.payload_bytes), map(_number, fit.latency_s)
            table.add_row(escape(row.name), _number(fit.fixed_s), bandwidth, ", ".join(sizes), ", ".join(times))
    return table


def _phases(report: BenchReport) -> Table:
    table = _table("phases of the latency", PHASES)
    for row in report.rows:
        table.add_row(escape(row.name), *(_ms(getattr(row.phases, name)) for name in PHASES))
    return table


def _table(name: str, columns: Sequence[str]) -> Table:
    return Table(
        Column(name, no_wrap=True),
        *(Column(text, justify="right", no_wrap=True) for text in columns),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _cells(spread: Spread) -> tuple[str, str, str]:
    return _ms(spread), _number(spread.min), _number(spread.max)


def _ms(spread: Spread) -> str:
    return _number(spread.median)


def _number(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"  # noqa: PLR2004 - three digits


def _ratio(value: float, of: float) -> str:
    return f"{value / of:.2f}" if of > 0 else "-"
