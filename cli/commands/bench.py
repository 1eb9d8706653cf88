"""``weightlane bench`` runs the benchmark and shows its report as tables, JSON and a plot."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError, StorageError

from ..bench import BenchReport, BenchSettings, report_tables, run_bench, unavailable_table
from ..bench.report.plot import check_plot, plot_report
from ..config.toml_file import toml_value
from ..output import console

_PART = "benchmark"


def measure(settings: Sequence[str], *, json_file: Path | None, plot_file: Path | None, **values: Any) -> bool:
    """Run the benchmark and print its report. Returns False if no engine could run, or a receiver got wrong bytes.

    Args:
        settings: Options of engines, each ``engine.key=value`` with a TOML value or plain text.
        json_file: File to write the report to as JSON.
        plot_file: File to draw the report into; its ending chooses the format.
        values: Values of `BenchSettings`, as the user gave them.
    """
    shown = console(soft_wrap=False)
    chosen = BenchSettings.checked(options=_options(settings), **values)
    for path in (json_file, plot_file):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"there is no directory {path.resolve().parent} to write {path.name} to.", part=_PART)
    if plot_file is not None:
        check_plot(plot_file)
    with _terminable():
        found = run_bench(chosen, lambda text: shown.print(text, style="dim", markup=False))
    if not isinstance(found, BenchReport):
        shown.print(unavailable_table(found))
        return False
    for part in report_tables(found):
        shown.print(part)
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(found.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{json_file} cannot be written: {error}.", part=_PART) from error
    if plot_file is not None:
        plot_report(found, plot_file)
    return found.verified


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the block, and everything that it started, as Ctrl-C does."""

    def end(*_: object) -> None:
        raise asyncio.CancelledError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def listed(text: str) -> tuple[str, ...]:
    """Split ``"a,b"`` into names."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _options(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    options: dict[str, dict[str, Any]] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        engine, dot, key = path.rpartition(".")
        if not (equals and dot and engine and key):
            raise ConfigError(f"--set {setting!r} does not have the form engine.key=value.", part=_PART)
        options.setdefault(engine, {})[key] = toml_value(text)
    return options
