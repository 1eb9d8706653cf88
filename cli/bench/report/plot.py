"""Draws a report: the phases of each row's latency, and the limits of the machine."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError, StorageError

from .bench_report import PHASES, BenchReport

_PART = "benchmark"
_INCHES_PER_ROW = 0.5
_COLOURS = dict(zip(PHASES, ("#4e79a7", "#f28e2b", "#59a14f", "#76b7b2", "#edc948", "#e15759"), strict=True))


def check_plot(path: Path) -> None:
    """Raise `ConfigError` unless matplotlib can write the format that `path` ends with."""
    known = _figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(
            f"{path.name} does not end with a format that matplotlib can write.",
            part=_PART,
            hint=f"Formats: {', '.join(sorted(known))}.",
        )


def _figure(**how: Any) -> Any:
    # If matplotlib builds its font cache slowly, it would say so on standard error.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    return importlib.import_module("matplotlib.figure").Figure(**how)


def plot_title(report: BenchReport) -> str:
    """Summarise the row whose rollout stops for the shortest time."""
    best = min(report.rows, key=lambda row: row.rollout_blocked_s.median)
    copies = best.rollout_blocked_s.median / max(1e-9, report.limits.memcpy_all_receivers_s.median)
    blocking_s = report.blocking.trainer_blocked_s.median
    share = best.trainer_blocked_s.median / max(1e-9, blocking_s)
    return (
        f"{best.engine}: rollout stops for {copies:.2f}x one copy, trainer for {100 * share:.2g} % of a blocking sync\n"
        f"{report.setup.model}, {report.setup.payload_bytes / 1e6:.0f} MB, {report.setup.receivers} receivers"
    )


def plot_report(report: BenchReport, path: Path) -> None:
    """Draw `report` into `path`. Raises the errors of `check_plot`, or `StorageError` when the file cannot be written."""
    check_plot(path)
    figure = _figure(figsize=(9, 2.4 + _INCHES_PER_ROW * len(report.rows)), layout="constrained")
    axes = figure.subplots()
    names = [row.name for row in report.rows]
    left = [0.0] * len(names)
    for phase in PHASES:
        widths = [1e3 * getattr(row.phases, phase).median for row in report.rows]
        axes.barh(names, widths, left=left, color=_COLOURS[phase], label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for number, row in enumerate(report.rows):
        limit_ms = 1e3 * report.limit_s(row)
        label = "limit of the row" if number == 0 else None
        axes.plot([limit_ms, limit_ms], [number - 0.4, number + 0.4], color="black", linewidth=2, label=label)
    blocking_ms = 1e3 * report.blocking.latency_s.median
    axes.axvline(blocking_ms, color="gray", linestyle="--", label="blocking sync, both sides stopped")
    axes.invert_yaxis()
    axes.set_xlabel("ms from publishing to the last receiver's commit (medians)")
    axes.set_title(plot_title(report), fontsize=10)
    figure.legend(fontsize=8, ncols=4, loc="outside lower center")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}.", part=_PART) from error
