"""Runs the class of a suite with pytest in this process, and turns pytest's reports into results. All suites use this module."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from weightlane.plugins.entry_points import entry_points_of

from ..errors import ConfigError, EngineContractError, EngineImportError, WeightlaneError

PART = "conformance"
_NO_PLUGINS = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
_PYTEST_SETTINGS = (_NO_PLUGINS, "PYTEST_ADDOPTS", "PYTEST_PLUGINS")

_FAILED_CHECKS = ("AssertionError", "Failed", "HungError", "UntypedError")
"""Exceptions that report a broken promise. A reason omits their names."""


class CheckOutcome(StrEnum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    EXPECTED_FAILURE = "expected failure"
    """The check failed, as `EngineConformance.expected_failures` predicts."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    name: str
    outcome: CheckOutcome
    seconds: float
    reason: str
    """Why the check failed or was skipped, in one line; empty if it passed."""
    detail: str
    """The full report of a failure; empty for other outcomes."""


@dataclass(frozen=True, slots=True)
class SuiteReport:
    """The report of a run of a suite."""

    engine: str
    checks: Sequence[CheckResult]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether at least one check ran and none failed."""
        outcomes = {check.outcome for check in self.checks}
        return CheckOutcome.FAILED not in outcomes and bool(
            outcomes & {CheckOutcome.PASSED, CheckOutcome.EXPECTED_FAILURE}
        )

    def count(self, outcome: CheckOutcome) -> int:
        """Return the number of checks with this outcome."""
        return sum(check.outcome == outcome for check in self.checks)


def registered_suite(group: str, engine: str, base: type, default: type) -> type[Any]:
    """Return the suite that a distribution registers under its engine's name in `group`, a subclass of `base`, or `default`.

    Raises `RegistryError` when the registered suite cannot be imported, or is not a subclass of `base`.
    """
    for entry_point in entry_points_of(group, engine):
        try:
            suite = entry_point.load()
        except Exception as cause:
            raise EngineImportError(
                f"the suite of {engine} could not be imported from {entry_point.value}: {cause}.", part=PART
            ) from cause
        if isinstance(suite, type) and issubclass(suite, base):
            return suite
        raise EngineContractError(f"{entry_point.value} is not an {default.__name__} class.", part=PART)
    return default


def refuse_unknown(
    suite: type, checks: Sequence[str], limits: Sequence[str], known_limits: Sequence[str], page: str
) -> None:
    """Raise `ConfigError` for names in `checks` or `limits` that `suite` does not have; `page` lists the checks."""
    if unknown := [name for name in checks if not callable(getattr(suite, name.partition("[")[0], None))]:
        raise ConfigError(
            f"there is no check called {', '.join(unknown)}.",
            part=PART,
            hint=f"{page} lists the checks; their names begin with test_.",
        )
    if wrong := [limit for limit in limits if limit not in known_limits]:
        raise ConfigError(
            f"there is no limit called {', '.join(wrong)}.", part=PART, hint=f"Limits: {', '.join(known_limits)}."
        )


def run_by_pytest(
    source: str,
    *,
    checks: Sequence[str],
    junit: Path | None,
    on_check: Callable[[CheckResult], None] | None,
    configure: Callable[[pytest.Config], None],
) -> tuple[list[CheckResult], float]:
    """Run the `checks`, by default all, of the class ``TestEngine`` that the module with the text `source` defines.

    `junit` is a file for a JUnit report. `on_check` is called with each result as soon as the check has ended, and `configure`
    with pytest's configuration before anything runs. Returns the results, and the seconds that all checks took. Raises
    `WeightlaneError` when pytest itself failed.
    """
    observer = _Observer(on_check, configure)
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        # pytest imports by name, and a second run in this process must not find the first one's module.
        file = Path(folder, f"test_{Path(folder).name.replace('-', '_')}.py")
        file.write_text(source, encoding="utf-8")
        Path(folder, "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        arguments = ["-c", f"{folder}/pytest.ini", "--rootdir", folder, "-s", "-q", "--import-mode=importlib"]
        arguments += ["-p", "no:cacheprovider", "-p", "no:faulthandler", "--basetemp", str(Path(folder, "basetemp"))]
        # That plugin collects garbage several times to find unraisable exceptions, but engines are in other processes.
        arguments += ["-p", "no:unraisableexception"]
        arguments += [f"--junitxml={junit.resolve()}"] if junit else []
        arguments += [f"{file}::TestEngine::{name}" for name in checks] or [str(file)]
        output = io.StringIO()
        with _without_plugins(), contextlib.redirect_stdout(output):
            status = pytest.main(arguments, plugins=[observer])
        sys.modules.pop(file.stem, None)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise WeightlaneError(
            f"the suite did not complete (pytest says {status}): {output.getvalue().strip()[-2000:]}", part=PART
        )
    return observer.results, observer.seconds


class _Observer:
    """A pytest plugin that turns pytest's reports into results."""

    def __init__(
        self, on_check: Callable[[CheckResult], None] | None, configure: Callable[[pytest.Config], None]
    ) -> None:
        self._on_check = on_check
        self._configure = configure
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self.results: list[CheckResult] = []
        self.seconds = 0.0

    def pytest_configure(self, config: pytest.Config) -> None:
        """Let the runner of the suite prepare the session."""
        self._configure(config)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the three reports of a check, and make its result from them."""
        self._reports.setdefault(report.nodeid, []).append(report)
        if report.when != "teardown":
            return
        result = _result(self._reports.pop(report.nodeid))
        self.seconds += result.seconds
        self.results.append(result)
        if self._on_check:
            self._on_check(result)


def _result(reports: Sequence[pytest.TestReport]) -> CheckResult:
    name = reports[0].nodeid.rpartition("::")[2]
    seconds = sum(report.duration for report in reports)
    for report in reports:
        expected = getattr(report, "wasxfail", None)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = _one_line(str(crash.message if crash else report.longrepr))
            reason = message if message.startswith(("expected ", "[XPASS")) else f"expected no error, got {message}"
            return CheckResult(name, CheckOutcome.FAILED, seconds, reason, report.longreprtext)
        if report.skipped and expected is not None:
            return CheckResult(name, CheckOutcome.EXPECTED_FAILURE, seconds, _one_line(expected), "")
        if report.skipped:
            where = report.longrepr
            text = where[2] if isinstance(where, tuple) else str(where)
            return CheckResult(name, CheckOutcome.SKIPPED, seconds, _one_line(text.removeprefix("Skipped: ")), "")
    return CheckResult(name, CheckOutcome.PASSED, seconds, "", "")


def _one_line(text: str) -> str:
    """Return the first line of a message without the exception's module, and without its name if that means a failed check."""
    first = text.strip().splitlines()[0] if text.strip() else ""
    kind, colon, rest = first.partition(": ")
    kind = kind.rpartition(".")[2] if " " not in kind else kind
    return rest if kind in _FAILED_CHECKS else f"{kind}{colon}{rest}"


@contextlib.contextmanager
def _without_plugins() -> Iterator[None]:
    """Run pytest without plugins and options of the environment, and without writing byte code of the temporary file."""
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    before = {name: os.environ.pop(name) for name in _PYTEST_SETTINGS if name in os.environ}
    os.environ[_NO_PLUGINS] = "1"
    try:
        yield
    finally:
        sys.dont_write_bytecode = bytecode
        del os.environ[_NO_PLUGINS]
        os.environ.update(before)
