"""The suite for rollout engines catches what is wrong: one broken engine per defect, each by the check made for it."""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path

import broken_rollout_engines
import pytest
from broken_rollout_engines import DEFECTS
from tiny_models import make_qwen3
from waiting import HANG_S

from weightlane.ckpt_engines import ConfigError, EngineContractError, EngineImportError
from weightlane.ckpt_engines.conformance import CheckOutcome
from weightlane.rollout import RolloutConfig
from weightlane.rollout.conformance import RolloutEngineConformance, run_rollout_conformance
from weightlane.rollout.conformance.checks.base import engine_class

ENGINES = Path(broken_rollout_engines.__file__)
ROOT = ENGINES.parents[3]
GUIDE = (ROOT / "docs/guides/writing-a-rollout-engine.md").read_text()
TEMPLATE = ROOT / "plugins/packages/weightlane-rollout-engine-template/weightlane_rollout_engine_template.py"
OFTEN = {"StampsTheEnd", "KeepsCaches", "ChangesBeforeItChecks", "LeavesAThread", "ScoresWithoutTemperature"}
"""Engines that `make test` tries; `make test-all` tries all."""


@pytest.mark.parametrize(
    "engine", [pytest.param(each, marks=() if each in OFTEN else pytest.mark.exhaustive) for each in DEFECTS]
)
def test_a_broken_rollout_engine_is_caught_by_the_check_made_for_it(engine: str) -> None:
    check, complaint = DEFECTS[engine]
    limits = {"deadline_s": HANG_S, "slack_s": 1.0}
    (result,) = run_rollout_conformance(f"{ENGINES}:{engine}", checks=[check], limits=limits).checks
    assert result.outcome is CheckOutcome.FAILED, f"{engine}: {result}"
    assert re.search(complaint, result.reason), f"not said of {engine}: {complaint}, but {result.reason}"
    assert result.reason.startswith("expected ")


def test_the_suite_has_the_checks_that_broken_engines_name_and_no_other() -> None:
    functions = inspect.getmembers(RolloutEngineConformance, inspect.isfunction)
    checks = {name for name, _ in functions if name.startswith("test_")}
    assert {check.partition("[")[0] for check, _ in DEFECTS.values()} == checks


def test_what_is_no_rollout_engine_no_limit_or_no_setting_is_refused_with_a_typed_error() -> None:
    with pytest.raises(ConfigError, match="no limit called prompt_s"):
        run_rollout_conformance("transformers", limits={"prompt_s": 1})
    with pytest.raises(ConfigError, match="no check called test_nothing"):
        run_rollout_conformance("transformers", checks=["test_nothing"])
    with pytest.raises(ConfigError, match="replicas: Input should be greater than or equal to 1"):
        run_rollout_conformance("transformers", {"replicas": 0})
    with pytest.raises(ConfigError, match="transformers does not do what is set: tensor_parallel = 2"):
        run_rollout_conformance("transformers", {"tensor_parallel": 2})
    with pytest.raises(EngineImportError, match="NoSuchEngine"):
        run_rollout_conformance(f"{ENGINES}:NoSuchEngine")
    with pytest.raises(EngineContractError, match="DEFECTS is not a RolloutEngine class"):
        run_rollout_conformance(f"{ENGINES}:DEFECTS")


def test_the_guides_code_runs_or_is_the_templates_which_starts_again_once_closed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    loader, answer, suite = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    shown, made_of = (
        "\n".join(line.strip() for line in text.splitlines() if line.strip()) for text in (loader, TEMPLATE.read_text())
    )
    assert shown in made_of
    exec(compile(answer, "answer", "exec"), {})
    assert "versions=[3, 3, 3, 3, 3, 3, 3, 3]" in capsys.readouterr().out
    made: dict[str, type[RolloutEngineConformance]] = {}
    exec(compile(suite, "suite", "exec"), made)
    assert issubclass(made["TestMyEngine"], RolloutEngineConformance)
    template = engine_class(f"{TEMPLATE}:TemplateRolloutEngine")
    engine = template("rollout-0", RolloutConfig(max_model_len=32), make_qwen3(tmp_path, seed=0))
    with asyncio.Runner() as runner:
        for _ in range(2):
            runner.run(engine.start(0))
            runner.run(engine.close())
