"""``weightlane bench`` runs the benchmark and shows its report as tables and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError, StorageError

from ..bench import BenchReport, BenchSettings, report_tables, run_bench, unavailable_table
from ..config.toml_file import apply_setting
from ..output import console, own_stdout

_PART = "benchmark"


def measure(settings: Sequence[str], *, as_json: bool, out: Path | None, **values: Any) -> bool:
    """Run the benchmark and print its report. Returns False if no engine could run, or a receiver got wrong bytes.

    `settings` are options of engines, each ``engine.key=value`` with a TOML value or plain text; `values` those of
    `BenchSettings`, as the user gave them. With `as_json` the report is printed as JSON, and the tables go to standard error.
    The file `out` gets the report as JSON, too.
    """
    chosen = BenchSettings.checked(options=_options(settings), **values)
    if out is not None and not out.resolve().parent.is_dir():
        raise ConfigError(f"there is no directory {out.resolve().parent} to write {out.name} to.", part=_PART)
    with own_stdout() as stdout:
        shown = console(sys.stderr if as_json else stdout, soft_wrap=False)
        found = run_bench(chosen, lambda text: shown.print(text, style="dim", markup=False))
        if not isinstance(found, BenchReport):
            shown.print(unavailable_table(found))
            found_text = json.dumps({"unavailable": found})
        else:
            for part in report_tables(found):
                shown.print(part)
            found_text = json.dumps(found.model_dump(mode="json"), indent=1)
        if as_json:
            print(found_text, file=stdout)
    if not isinstance(found, BenchReport):
        return False
    if out is not None:
        try:
            out.write_text(f"{found_text}\n", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{out} cannot be written: {error}.", part=_PART) from error
    return found.verified


def _options(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    options: dict[str, dict[str, Any]] = {}
    for setting in settings:
        apply_setting(options, setting)
        engine = setting.partition("=")[0].partition(".")[0]
        if not isinstance(options.get(engine), dict):
            raise ConfigError(f"--set {setting!r} does not have the form engine.key=value.", part=_PART)
    return options
