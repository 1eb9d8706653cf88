"""Runs the suite without a test file, as ``weightlane conformance`` does for a training engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from weightlane.ckpt_engines import ConfigError
from weightlane.ckpt_engines.conformance import CheckResult, SuiteReport
from weightlane.ckpt_engines.conformance.processes.pool import Pool
from weightlane.ckpt_engines.conformance.pytest_run import refuse_unknown, registered_suite, run_by_pytest

from ..config import TrainerConfig
from .checks import TrainingEngineConformance
from .checks.base import POOL, TrainingConformanceBase
from .processes.rank_process import engine_class

GROUP = "weightlane.training_conformance"
"""Entry-point group in which a distribution registers its own subclass of the suite under its training engine's name."""
_LIMITS = ("deadline_s", "missing_s", "slack_s", "prompt_s", "grace_s")
_SOURCE = """\
from math import inf, nan
from {module} import {suite} as _Suite

class TestEngine(_Suite):
    engine = {name!r}
{more}
"""


def run_training_conformance(
    engine: str,
    layout: Mapping[str, Any] | None = None,
    *,
    checks: Sequence[str] = (),
    junit: Path | None = None,
    on_check: Callable[[CheckResult], None] | None = None,
    pool: Pool | None = None,
    limits: Mapping[str, float] | None = None,
) -> SuiteReport:
    """Run the suite against a training engine.

    The engine's distribution may register its own subclass of the suite by an entry point, which then runs instead.

    Args:
        engine: Name of an installed training engine, ``module:Class`` or ``file.py:Class``.
        layout: Settings of `TrainerConfig` for the only layout that is tried; None for the layouts of the suite.
        checks: Names of checks to run, such as ``test_shards_never_move``; all if empty.
        junit: File to write a JUnit report to.
        on_check: Called with each result at once.
        pool: Processes to use; by default the run starts its own.
        limits: Other values for the suite's limits, such as ``{"prompt_s": 60.0}`` on a slow machine.

    Raises:
        ConfigError: There is no such engine, check or limit, or the settings are wrong.
        RegistryError: The class cannot be loaded, or is not a complete `TrainingEngine`.
    """
    engine_class(engine)
    suite = registered_suite(GROUP, engine, TrainingConformanceBase, TrainingEngineConformance)
    refuse_unknown(suite, checks, list(limits or {}), _LIMITS, "docs/guides/conformance-of-training-engines.md")
    more: dict[str, Any] = dict(limits or {})
    if layout is not None:
        more["layouts"] = {"as set": _checked(engine, layout)}
    source = _SOURCE.format(
        module=suite.__module__,
        suite=suite.__qualname__,
        name=engine,
        more="\n".join(f"    {name} = {value!r}" for name, value in more.items()),
    )

    def use_the_callers_pool(config: pytest.Config) -> None:
        if pool is not None:
            config.stash[POOL] = pool

    results, seconds = run_by_pytest(
        source, checks=checks, junit=junit, on_check=on_check, configure=use_the_callers_pool
    )
    return SuiteReport(engine, results, seconds)


def _checked(engine: str, layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return `layout` after checking that `TrainerConfig` takes it. Raises `ConfigError` otherwise."""
    try:
        TrainerConfig.model_validate({"engine": engine, **layout})
    except ValidationError as cause:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in cause.errors())
        raise ConfigError(
            f"these are no settings for trainer ranks: {wrong}.",
            part="conformance",
            hint="--set takes keys of the trainer section of a run's configuration.",
        ) from cause
    return dict(layout)
