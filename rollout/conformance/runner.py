"""Runs the suite without a test file, as ``weightlane conformance --rollout`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weightlane.ckpt_engines import ConfigError
from weightlane.ckpt_engines.conformance import CheckResult, SuiteReport
from weightlane.ckpt_engines.conformance.pytest_run import refuse_unknown, registered_suite, run_by_pytest

from ..config import RolloutConfig
from ..contract.registry import missing_capabilities
from .checks.base import RolloutConformanceBase, engine_class
from .suite import RolloutEngineConformance

GROUP = "weightlane.rollout_conformance"
"""Entry-point group in which a distribution registers its own subclass of the suite under its rollout engine's name."""
_LIMITS = ("deadline_s", "slack_s")
_SOURCE = """\
from math import inf, nan
from {module} import {suite} as _Suite

class TestEngine(_Suite):
    engine = {name!r}
{more}
"""


def run_rollout_conformance(
    engine: str,
    settings: Mapping[str, Any] | None = None,
    *,
    checks: Sequence[str] = (),
    junit: Path | None = None,
    on_check: Callable[[CheckResult], None] | None = None,
    limits: Mapping[str, float] | None = None,
) -> SuiteReport:
    """Run the suite against a rollout engine.

    The engine's distribution may register its own subclass of the suite by an entry point, which then runs instead.

    Args:
        engine: Name of an installed rollout engine, ``module:Class`` or ``file.py:Class``.
        settings: Settings of `RolloutConfig` for every replica, beside those of the suite.
        checks: Names of checks to run, such as ``test_no_cache_serves_older_weights``; all if empty.
        junit: File to write a JUnit report to.
        on_check: Called with each result at once.
        limits: Other values for the suite's limits, such as ``{"deadline_s": 600.0}`` on a slow machine.

    Raises:
        ConfigError: There is no such engine, check or limit, or the settings are wrong.
        RegistryError: The class cannot be loaded, or is not a complete `RolloutEngine`.
    """
    found = engine_class(engine)
    suite = registered_suite(GROUP, engine, RolloutConformanceBase, RolloutEngineConformance)
    refuse_unknown(suite, checks, list(limits or {}), _LIMITS, "docs/guides/writing-a-rollout-engine.md")
    more: dict[str, Any] = dict(limits or {})
    if settings:
        more["settings"] = {**suite.settings, **settings}
        try:
            config = RolloutConfig.model_validate({**more["settings"], "engine": engine})
        except ValidationError as cause:
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in cause.errors())
            raise ConfigError(
                f"these are no settings for a replica: {wrong}.",
                part="conformance",
                hint="--set takes keys of the rollout section of a run's configuration.",
            ) from cause
        if refused := missing_capabilities(config, found.capabilities):
            raise ConfigError(f"{engine} does not do what is set: {', '.join(refused)}.", part="conformance")
    source = _SOURCE.format(
        module=suite.__module__,
        suite=suite.__qualname__,
        name=engine,
        more="\n".join(f"    {name} = {value!r}" for name, value in more.items()),
    )
    results, seconds = run_by_pytest(source, checks=checks, junit=junit, on_check=on_check, configure=lambda _: None)
    return SuiteReport(engine, results, seconds)
