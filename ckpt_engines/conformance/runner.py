"""Runs the suite without a test file, as ``weightlane conformance`` does."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from ..contract.capabilities import Capabilities
from ..errors import (
    ConfigError,
    EngineContractError,
    EngineImportError,
    EngineUnavailableError,
    WeightlaneError,
)
from ..registry import why_unavailable
from .checks.base import POOL, ConformanceBase
from .processes.pool import Pool
from .processes.resolve import create_engine, engine_class
from .suite import EngineConformance

GROUP = "weightlane.conformance"
"""Entry-point group in which a distribution registers its own subclass of the suite under its engine's name."""
_PART = "conformance"
_NO_PLUGINS = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
_LIMITS = (
    "deadline_s",
    "interrupted_s",
    "expiring_s",
    "settle_s",
    "slack_s",
    "prompt_s",
    "grace_s",
    "rounds",
    "most_halves",
)
_SOURCE = """\
import pytest
from {module} import {suite} as _Suite

class TestEngine(_Suite):
{limits}

    @pytest.fixture
    def engine_name(self):
        return {name!r}
"""
_OPTIONS = """
    @pytest.fixture
    def engine_options(self):
        return {options!r}
"""


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
    """The whole report of a failure; empty for other outcomes."""


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """The report of a run of the suite."""

    engine: str
    capabilities: Capabilities
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


def run_conformance(
    engine: str,
    options: Mapping[str, Any] | None = None,
    *,
    checks: Sequence[str] = (),
    junit: Path | None = None,
    on_check: Callable[[CheckResult], None] | None = None,
    pool: Pool | None = None,
    limits: Mapping[str, float] | None = None,
) -> ConformanceReport:
    """Run the suite against an engine.

    The engine's distribution may register its own subclass of the suite by an entry point, which then runs instead.

    Args:
        engine: Name of an installed engine, ``module:Class`` or ``file.py:Class``.
        options: The engine's options; None for those of the distribution's own suite, if it has one.
        checks: Names of checks to run, such as ``test_nothing_is_unpickled``; all if empty.
        junit: File to write a JUnit report to.
        on_check: Called with each result at once.
        pool: Processes to use; by default the run starts its own.
        limits: Other values for the suite's limits, such as ``{"slack_s": 5.0}`` on a slow machine.

    Raises:
        RegistryError: There is no such engine, or it is broken.
        EngineUnavailableError: The engine cannot run here.
        ConfigError: The options are wrong, or there is no such check or limit.
    """
    cls, suite = engine_class(engine), _suite_of(engine)
    if reason := why_unavailable(cls):
        raise EngineUnavailableError(f"{engine} cannot run here: {reason}.", part=_PART)
    if options is not None or suite is EngineConformance:
        create_engine(engine, options or {})
    unknown = [name for name in checks if not callable(getattr(suite, name.partition("[")[0], None))]
    if unknown:
        raise ConfigError(
            f"there is no check called {', '.join(unknown)}.",
            part=_PART,
            hint="docs/guides/conformance.md lists the checks; their names begin with test_.",
        )
    if wrong := [limit for limit in limits or {} if limit not in _LIMITS]:
        raise ConfigError(
            f"there is no limit called {', '.join(wrong)}.", part=_PART, hint=f"Limits: {', '.join(_LIMITS)}."
        )
    observer = _Observer(on_check, pool)
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        lines = "\n".join(f"    {limit} = {value!r}" for limit, value in (limits or {}).items())
        source = _SOURCE.format(module=suite.__module__, suite=suite.__qualname__, name=engine, limits=lines)
        if options is not None:
            source += _OPTIONS.format(options=dict(options))
        # pytest imports by name, and a second run in this process must not find the first one's module.
        file = Path(folder, f"test_{Path(folder).name.replace('-', '_')}.py")
        file.write_text(source, encoding="utf-8")
        Path(folder, "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        arguments = ["-c", f"{folder}/pytest.ini", "--rootdir", folder, "-s", "-q", "--import-mode=importlib"]
        arguments += ["-p", "no:cacheprovider", "-p", "no:faulthandler", "--basetemp", str(Path(folder, "basetemp"))]
        # That plugin collects garbage several times to find unraisable exceptions, but the halves are in other processes.
        arguments += ["-p", "no:unraisableexception"]
        arguments += [f"--junitxml={junit.resolve()}"] if junit else []
        arguments += [f"{file}::TestEngine::{name}" for name in checks] or [str(file)]
        output = io.StringIO()
        with _without_plugins(), contextlib.redirect_stdout(output):
            status = pytest.main(arguments, plugins=[observer])
        sys.modules.pop(file.stem, None)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise WeightlaneError(
            f"the suite did not complete (pytest says {status}): {output.getvalue().strip()[-2000:]}",
            part=_PART,
        )
    return ConformanceReport(engine, cls.capabilities, observer.results, observer.seconds)


def _suite_of(engine: str) -> type[ConformanceBase]:
    for entry_point in entry_points(group=GROUP, name=engine):
        try:
            suite = entry_point.load()
        except Exception as cause:
            raise EngineImportError(
                f"the suite of {engine} could not be imported from {entry_point.value}: {cause}.", part=_PART
            ) from cause
        if isinstance(suite, type) and issubclass(suite, ConformanceBase):
            return suite
        raise EngineContractError(f"{entry_point.value} is not an EngineConformance class.", part=_PART)
    return EngineConformance


class _Observer:
    """A pytest plugin that turns pytest's reports into results."""

    def __init__(self, on_check: Callable[[CheckResult], None] | None, pool: Pool | None) -> None:
        self._on_check = on_check
        self._pool = pool
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self.results: list[CheckResult] = []
        self.seconds = 0.0

    def pytest_configure(self, config: pytest.Config) -> None:
        """Use the caller's pool."""
        if self._pool is not None:
            config.stash[POOL] = self._pool

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
    """Return the first line of a message, without the exception's module, and without its name if a check has failed."""
    first = text.strip().splitlines()[0] if text.strip() else ""
    kind, colon, rest = first.partition(": ")
    kind = kind.rpartition(".")[2] if " " not in kind else kind
    return rest if kind in _FAILED_CHECKS else f"{kind}{colon}{rest}"


@contextlib.contextmanager
def _without_plugins() -> Iterator[None]:
    """Run pytest without installed plugins, and without writing byte code of the temporary file."""
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    autoload = os.environ.get(_NO_PLUGINS)
    os.environ[_NO_PLUGINS] = "1"
    try:
        yield
    finally:
        sys.dont_write_bytecode = bytecode
        if autoload is None:
            del os.environ[_NO_PLUGINS]
        else:
            os.environ[_NO_PLUGINS] = autoload
