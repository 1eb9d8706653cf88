"""``weightlane conformance`` runs a conformance suite against an engine and prints lines, JSON or JUnit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from weightlane.ckpt_engines import EngineImportError
from weightlane.ckpt_engines.conformance import (
    CheckOutcome,
    CheckResult,
    ConformanceReport,
    SuiteReport,
    run_conformance,
)
from weightlane.ckpt_engines.conformance.processes.resolve import is_place, loaded_from

from ..config.toml_file import apply_setting
from ..extras import require
from ..output import console, own_stdout

_STYLES = {
    CheckOutcome.PASSED: "green",
    CheckOutcome.FAILED: "bold red",
    CheckOutcome.SKIPPED: "dim",
    CheckOutcome.EXPECTED_FAILURE: "yellow",
}
_OUTCOME_WIDTH = max(len(outcome) for outcome in CheckOutcome)


def check_engine(
    name: str, settings: Sequence[str], *, kind: str, checks: Sequence[str], as_json: bool, junit: Path | None
) -> bool:
    """Run the suite for the kind of engine that `name` names, print its results, and return whether the engine passed.

    `settings` are the engine's options, or settings of the trainer or rollout section, each ``key=value`` with a TOML value or
    plain text. `kind` is that of `name`, see `engine_kind`; a class at a place is tested as what it is. `checks` are the names of
    the checks to run; all if empty. With `as_json` one JSON document is printed instead of a line per check. `junit` is a file
    for a JUnit report.
    """
    options: dict[str, Any] = {}
    for setting in settings:
        apply_setting(options, setting)
    with own_stdout() as out:
        shown = console(out)
        on_check = None if as_json else lambda check: _print_check(shown, check)
        kind = _kind_at(name) or kind
        run: Callable[..., SuiteReport] = run_conformance
        if kind != "checkpoint":
            require(f"conformance --{kind}")
        if kind == "training":
            from weightlane.trainer.conformance import run_training_conformance as run  # noqa: PLC0415 - not for the others
        elif kind == "rollout":
            from weightlane.rollout.conformance import run_rollout_conformance as run  # noqa: PLC0415 - as above
        report = run(name, options or None, checks=checks, junit=junit, on_check=on_check)
        if as_json:
            print(json.dumps(_plain(report), indent=2), file=out)
        else:
            _print_verdict(shown, report, partial=bool(checks))
    return report.passed


def _kind_at(place: str) -> str:
    """The kind of the engine's class at `place`, such as ``module:Class``; empty if it is no training or rollout engine."""
    if not is_place(place):
        return ""
    try:
        loaded = loaded_from(place)
    except EngineImportError:  # which the suite for checkpoint engines raises once more
        return ""
    from weightlane.rollout.contract.engine import RolloutEngine  # noqa: PLC0415 - loads torch
    from weightlane.trainer import TrainingEngine  # noqa: PLC0415 - as above

    kinds = {"training": TrainingEngine, "rollout": RolloutEngine}
    return next((kind for kind, base in kinds.items() if isinstance(loaded, type) and issubclass(loaded, base)), "")


def _print_verdict(shown: Console, report: SuiteReport, *, partial: bool) -> None:
    for check in report.checks:
        if check.outcome is CheckOutcome.FAILED:
            shown.print(Text.assemble("\n", (check.name, "bold red"), f"\n{check.detail}"))
    counts = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in CheckOutcome if report.count(outcome))
    if not report.passed:
        verdict = ("does not conform", "bold red")
    elif partial:
        verdict = ("passes the requested checks; run all checks to see whether it conforms", "")
    else:
        verdict = ("conforms", "green")
    shown.print(Text.assemble(f"\n{report.engine} ", verdict, f": {counts} in {report.seconds:.1f} s"))


def _print_check(shown: Console, check: CheckResult) -> None:
    title = check.name.removeprefix("test_").replace("_", " ")
    outcome = f"{check.outcome:<{_OUTCOME_WIDTH}}"
    reason = f"  {check.reason}" if check.reason else ""
    shown.print(Text.assemble((outcome, _STYLES[check.outcome]), f" {check.seconds:6.2f} s  {title}", (reason, "dim")))


def _plain(report: SuiteReport) -> dict[str, Any]:
    facts = asdict(report)
    if isinstance(report, ConformanceReport):
        facts["capabilities"] = report.capabilities.to_plain()
    return {
        **facts,
        "passed": report.passed,
        "counts": {str(outcome): report.count(outcome) for outcome in CheckOutcome},
    }
