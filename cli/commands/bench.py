"""``weightlane bench`` runs the benchmark and shows its report as tables, JSON and plots."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError, StorageError

from ..bench import BenchReport, BenchSettings, report_tables, run_bench, unavailable_table
from ..bench.report.plot import check_plot, plot_report
from ..config.toml_file import apply_setting
from ..output import console, own_stdout

_PART = "benchmark"
_JSON = ".json"


def measure(settings: Sequence[str], *, as_json: bool, out: Sequence[Path], **values: Any) -> bool:
    """Run the benchmark and print its report. Returns False if no engine could run, or a receiver got wrong bytes.

    `settings` are options of engines, each ``engine.key=value`` with a TOML value or plain text; `values` those of
    `BenchSettings`, as the user gave them. With `as_json` the report is printed as JSON, and the tables go to standard error.
    Each file in `out` gets the report: JSON if the name ends with ``.json``, else a plot in the format of its ending.
    """
    chosen = BenchSettings.checked(options=_options(settings), **values)
    for path in out:
        if not path.resolve().parent.is_dir():
            raise ConfigError(f"there is no directory {path.resolve().parent} to write {path.name} to.", part=_PART)
        if path.suffix != _JSON:
            check_plot(path)
    with own_stdout() as stdout:
        shown = console(sys.stderr if as_json else stdout, soft_wrap=False)
        found = run_bench(chosen, lambda text: shown.print(text, style="dim", markup=False))
        if not isinstance(found, BenchReport):
            shown.print(unavailable_table(found))
            found_text = json.dumps({"unavailable": found})
        else:
            for part in report_tables(found):
                shown.print(part)
            found_text = _text_of(found)
        if as_json:
            print(found_text, file=stdout)
    if not isinstance(found, BenchReport):
        return False
    for path in out:
        _write(found, path)
    return found.verified


def _text_of(report: BenchReport) -> str:
    return json.dumps(report.model_dump(mode="json"), indent=1)


def _write(report: BenchReport, path: Path) -> None:
    if path.suffix != _JSON:
        plot_report(report, path)
        return
    try:
        path.write_text(_text_of(report) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}.", part=_PART) from error


def _options(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    options: dict[str, dict[str, Any]] = {}
    for setting in settings:
        apply_setting(options, setting)
        engine = setting.partition("=")[0].partition(".")[0]
        if not isinstance(options.get(engine), dict):
            raise ConfigError(f"--set {setting!r} does not have the form engine.key=value.", part=_PART)
    return options
