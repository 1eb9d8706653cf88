"""``weightlane conformance``: the conformance suite against an engine, as a table, JSON or JUnit."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from weightlane.ckpt_engines import ConfigError
from weightlane.ckpt_engines.conformance import CheckResult, ConformanceReport, Outcome, run_conformance

_STYLES = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.SKIPPED: "dim",
    Outcome.EXPECTED_FAILURE: "yellow",
}
_OUTCOME_WIDTH = max(len(outcome) for outcome in Outcome)


def check_engine(
    name: str, settings: Sequence[str], *, checks: Sequence[str], as_json: bool, junit: Path | None
) -> bool:
    """Run the suite, print what it finds, and return whether the engine passed.

    Args:
        name: The engine.
        settings: Its options, each ``key=value`` with a TOML value or plain text.
        checks: Names of the checks to run; all when empty.
        as_json: Print one JSON document in place of a line per check.
        junit: A file for a JUnit report.
    """
    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)  # the suite diverts what pytest prints
    options = _parsed(settings) if settings else None
    if as_json:
        report = run_conformance(name, options, checks=checks, junit=junit)
        print(json.dumps(_plain(report), indent=2))  # noqa: T201
        return report.passed
    report = run_conformance(
        name, options, checks=checks, junit=junit, on_check=lambda check: _print_check(console, check)
    )
    for check in report.checks:
        if check.outcome is Outcome.FAILED:
            console.print(f"\n[bold red]{escape(check.name)}[/bold red]\n{escape(check.detail)}")
    counts = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in Outcome if report.count(outcome))
    if not report.passed:
        verdict = "[bold red]does not conform[/bold red]"
    elif checks:
        verdict = "passes what was asked for; whether it conforms, all checks together say"
    else:
        verdict = "[green]conforms[/green]"
    console.print(f"\n{escape(name)} {verdict}: {counts} in {report.seconds:.1f} s")
    return report.passed


def _print_check(console: Console, check: CheckResult) -> None:
    style = _STYLES[check.outcome]
    title = check.name.removeprefix("test_").replace("_", " ")
    reason = f"  [dim]{escape(check.reason)}[/dim]" if check.reason else ""
    outcome = f"{check.outcome:<{_OUTCOME_WIDTH}}"
    console.print(f"[{style}]{outcome}[/{style}] {check.seconds:6.2f} s  {escape(title)}{reason}")


def _parsed(settings: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not (key and equals):
            raise ConfigError(f"{setting!r} is not of the form key=value.", part="conformance")
        *path, last = key.split(".")
        table = options
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{setting!r} contradicts an earlier setting.", part="conformance")
        try:
            table[last] = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            table[last] = text
    return options


def _plain(report: ConformanceReport) -> dict[str, Any]:
    facts = asdict(report)
    facts["capabilities"] |= {
        "devices": sorted(report.capabilities.devices),
        "delivery": sorted(report.capabilities.delivery),
    }
    return {
        **facts,
        "passed": report.passed,
        "counts": {str(outcome): report.count(outcome) for outcome in Outcome},
    }
