"""Runs the suite without a test file, as ``weightlane conformance`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..contract.capabilities import Capabilities
from ..errors import EngineUnavailableError
from ..registry import why_unavailable
from .checks import EngineConformance
from .checks.base import POOL, ConformanceBase
from .processes.pool import Pool
from .processes.resolve import create_engine, engine_class
from .pytest_run import PART, CheckResult, SuiteReport, refuse_unknown, registered_suite, run_by_pytest

GROUP = "weightlane.conformance"
"""Entry-point group in which a distribution registers its own subclass of the suite under its engine's name."""
_LIMITS = tuple(ConformanceBase.__annotations__)
_SOURCE = """\
from math import inf, nan
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


@dataclass(frozen=True, slots=True)
class ConformanceReport(SuiteReport):
    """The report of a run of the suite."""

    capabilities: Capabilities


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

    If the engine's distribution registers its own subclass of the suite by an entry point, that subclass runs instead.

    Args:
        engine: Name of an installed engine, ``module:Class`` or ``file.py:Class``.
        options: The engine's options; None for those of the distribution's own suite, if it has one.
        checks: Names of checks to run, such as ``test_nothing_is_unpickled``; all if empty.
        junit: File to write a JUnit report to.
        on_check: Called with each result as soon as the check has ended.
        pool: Processes to use; by default the run starts its own.
        limits: Other values for the suite's limits, such as ``{"slack_s": 5.0}`` on a slow machine.

    Raises `RegistryError`, `EngineUnavailableError` when the engine cannot run here, or `ConfigError` for wrong options, checks
    or limits.
    """
    cls, suite = engine_class(engine), registered_suite(GROUP, engine, ConformanceBase, EngineConformance)
    if reason := why_unavailable(cls):
        raise EngineUnavailableError(f"{engine} cannot run here: {reason}.", part=PART)
    if options is not None or suite is EngineConformance:
        create_engine(engine, options or {})
    refuse_unknown(suite, checks, list(limits or {}), _LIMITS, "docs/guides/conformance.md")
    lines = "\n".join(f"    {limit} = {value!r}" for limit, value in (limits or {}).items())
    source = _SOURCE.format(module=suite.__module__, suite=suite.__qualname__, name=engine, limits=lines)
    if options is not None:
        source += _OPTIONS.format(options=dict(options))

    def use_the_callers_pool(config: pytest.Config) -> None:
        if pool is not None:
            config.stash[POOL] = pool

    results, seconds = run_by_pytest(
        source, checks=checks, junit=junit, on_check=on_check, configure=use_the_callers_pool
    )
    return ConformanceReport(engine, results, seconds, cls.capabilities)
