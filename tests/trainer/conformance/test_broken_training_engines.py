"""The suite for training engines catches what is wrong: one broken engine per defect, each by the check made for it."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from pathlib import Path

import broken_training_engines
import pytest
from broken_training_engines import DEFECTS

from weightlane.ckpt_engines import ConfigError, EngineContractError, EngineImportError
from weightlane.ckpt_engines.conformance import CheckOutcome
from weightlane.ckpt_engines.conformance.processes.pool import Pool
from weightlane.trainer.conformance import TrainingEngineConformance, run_training_conformance
from weightlane.trainer.conformance.processes.team import MODULE

ENGINES = Path(broken_training_engines.__file__)
LIMITS = {"deadline_s": 20.0, "missing_s": 0.5, "slack_s": 1.0, "prompt_s": 5.0, "grace_s": 1.0}
"""Short ones: some broken engines make everybody wait for them."""
OFTEN = {"IgnoresTemperature", "CountsByRank", "AddsDecayToTheGradient", "PublishesTiedTensorsTwice", "LoadsNothing"}
"""Engines that `make test` tries; `make test-all` tries all."""
PATIENCE = (1, 6, 36)
"""Factors of these limits, for a machine that is so busy that shorter ones were missed by what is not broken."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(MODULE)
    made.preload(["weightlane_training_engine_template"])
    yield made
    made.close()


@pytest.mark.parametrize(
    "engine", [pytest.param(each, marks=() if each in OFTEN else pytest.mark.exhaustive) for each in DEFECTS]
)
def test_a_broken_training_engine_is_caught_by_the_check_made_for_it(pool: Pool, engine: str) -> None:
    check, complaint, ranks = DEFECTS[engine]
    for patience in PATIENCE:
        limits = {limit: patience * seconds for limit, seconds in LIMITS.items()}
        report = run_training_conformance(
            f"{ENGINES}:{engine}", {"ranks": ranks, "max_grad_norm": math.inf}, checks=[check], pool=pool, limits=limits
        )
        (result,) = report.checks
        if result.outcome is CheckOutcome.FAILED and re.search(complaint, result.reason):
            assert result.reason.startswith("expected ")
            return
    pytest.fail(f"not said of {engine}: {complaint}, but {result}")


def test_the_suite_has_the_checks_that_broken_engines_name_and_no_other() -> None:
    functions = inspect.getmembers(TrainingEngineConformance, inspect.isfunction)
    checks = {name for name, _ in functions if name.startswith("test_")}
    assert {check.partition("[")[0] for check, *_ in DEFECTS.values()} == checks


def test_what_is_no_training_engine_or_no_limit_is_refused_with_a_typed_error() -> None:
    with pytest.raises(ConfigError, match="no limit called slack"):
        run_training_conformance("fsdp2", limits={"slack": 1})
    with pytest.raises(ConfigError, match="no check called test_nothing"):
        run_training_conformance("fsdp2", checks=["test_nothing"])
    with pytest.raises(ConfigError, match="ranks: Input should be greater than or equal to 1"):
        run_training_conformance("fsdp2", {"ranks": 0})
    with pytest.raises(EngineImportError, match="NoSuchEngine"):
        run_training_conformance(f"{ENGINES}:NoSuchEngine")
    with pytest.raises(EngineContractError, match="Path is not a TrainingEngine class"):
        run_training_conformance(f"{ENGINES}:Path")
