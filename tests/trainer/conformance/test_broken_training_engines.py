"""The suite for training engines catches what is wrong: one broken engine per defect, each by the check made for it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from weightlane_training_engine_template import TemplateTrainingEngine

from weightlane.ckpt_engines import ConfigError, EngineContractError, EngineImportError
from weightlane.ckpt_engines.conformance import CheckOutcome
from weightlane.ckpt_engines.conformance.processes.pool import Pool
from weightlane.trainer.conformance import TrainingEngineConformance, run_training_conformance
from weightlane.trainer.conformance.processes.resolve import engine_class
from weightlane.trainer.conformance.processes.team import MODULE

ENGINES = Path(__file__).with_name("broken_training_engines.py")
LIMITS = {"deadline_s": 20.0, "missing_s": 0.5, "slack_s": 1.0, "prompt_s": 5.0, "grace_s": 1.0}
"""Short ones: some broken engines make everybody wait for them."""
PATIENCE = (1, 6, 36)
"""Factors of these limits, for a machine that is so busy that shorter ones were missed by what is not broken."""

DEFECTS: dict[str, tuple[str, str]] = {
    "IgnoresTemperature": ("outputs_are_those_of_transformers[as set-qwen3]", "logprobs of a sequence of .* off"),
    "TakesTheFirstLabel": ("every_label_of_a_position_has_its_log_probability[as set]", "logprobs of a seq.* off"),
    "CountsByRank": ("outputs_beside_a_gradient_are_those_of_forward[as set]", "sequences once over all ranks"),
    "AveragesOverRanks": (
        "the_gradient_of_a_mini_batch_is_that_of_one_process[as set-one call]",
        "the gradient within .* it is 0.5 off",
    ),
    "ForgetsEarlierCalls": (
        "the_gradient_does_not_depend_on_the_split_into_calls_and_micro_batches[as set-qwen3]",
        "the gradient within .* off",
    ),
    "IsNoNumberWithoutTargets": ("a_rank_without_a_sequence_takes_part[as set]", "as loss of all calls, it is nan"),
    "RoundsItsWeights": ("half_precision_is_for_computing_only[as set]", "float32 weights of .* bit for bit"),
    "TakesAnyToken": (
        "what_the_model_does_not_have_is_refused_and_leaves_no_gradient[as set-token]",
        "ProtocolError from forward_backward of rank 0, it returned",
    ),
    "TakesAnyMiniBatch": ("a_mini_batch_is_fixed_until_the_step[as set]", "ProtocolError from .* it returned"),
    "AddsDecayToTheGradient": ("steps_are_those_of_adamw[as set]", "the norm before clipping, .* of step 1"),
    "AsksTheFenceAfterwards": (
        "the_fence_is_told_of_each_tensor_once_before_it_changes[as set]",
        "no change before the fence, in rank 0 call 0 came after",
    ),
    "StepsWithoutAGradient": (
        "a_step_without_a_gradient_is_refused[as set]",
        "ProtocolError from rank 0, it raised noth",
    ),
    "StepsInAnyCase": ("a_step_whose_fence_fails_changes_nothing[as set]", "nothing to change on rank 0, it changed"),
    "TrainsOnAfterHalfAStep": (
        "a_step_that_stops_half_way_leaves_an_engine_that_only_loads[as set]",
        "WeightlaneError from forward_backward of rank 0, it returned",
    ),
    "StepsByWhateverThereIs": (
        "a_gradient_that_is_not_finite_changes_nothing[as set]",
        "GradientError from rank 0, it raised nothing",
    ),
    "PublishesTiedTensorsTwice": (
        "shards_are_the_checkpoint_bit_for_bit[as set-qwen3]",
        "tensors of the checkpoint, rank 0 also publishes lm_head.weight",
    ),
    "MovesOnLoading": ("shards_never_move[as set]", "they moved in load"),
    "OutlinesForOneRank": ("placements_are_known_before_ranks_run[as set-qwen3]", "the placement of rank 1"),
    "KeepsItsMoments": ("a_saved_run_continues_bit_for_bit[as set]", "the gradient norms .* in the same engine"),
    "ResumesWhatIsToBeginAnew": ("training_begins_anew_with_weights[as set]", "step 0 with the weights in state"),
    "StepsAsConfigured": ("a_step_may_have_settings_of_its_own[as set]", "two steps with settings of their own .* off"),
    "ForgetsMomentsOfOtherRanks": (
        "another_number_of_ranks_continues_a_saved_run[as set]",
        "the change by two steps of 2 ranks and one of 1 within .* off",
    ),
    "WritesIntoWhatIsThere": (
        "a_directory_that_exists_or_a_full_disk_fails_on_every_rank_and_leaves_nothing[as set]",
        "not to touch a directory that exists",
    ),
    "LoadsNothing": (
        "a_directory_without_a_state_is_not_loaded[as set]",
        "WeightlaneError from load of rank 0, it returned",
    ),
    "ForgetsGradientsThatAreAway": (
        "state_that_is_away_comes_back_bit_for_bit[as set]",
        "the same step after state was away",
    ),
    "ExportsWhatItHas": (
        "an_exported_model_loads_in_transformers[as set-qwen3]",
        "trained weights, exported as bfloat16, bit for bit",
    ),
    "RaisesWhatTorchRaises": (
        "a_killed_rank_is_reported_long_before_the_timeout[as set]",
        "WeightlaneError from forward_backward of rank 0, it raised RuntimeError",
    ),
    "WaitsForeverForRanks": ("a_rank_that_never_comes_is_waited_for_until_the_timeout[as set]", "hung"),
    "RaisesOnTheSecondClose": ("close_may_be_called_at_any_time_and_twice[as set]", "closed already"),
    "LeavesAThread": ("a_closed_engine_leaves_nothing_behind[as set]", r"rank 0 has \d+ threads instead of"),
}
"""Engine to the check that catches it, with its model or case, and a pattern for its error."""
OF_SEVERAL_RANKS = {
    "CountsByRank",
    "AveragesOverRanks",
    "IsNoNumberWithoutTargets",
    "OutlinesForOneRank",
    "ForgetsMomentsOfOtherRanks",
    "RaisesWhatTorchRaises",
    "WaitsForeverForRanks",
}
"""Engines whose defect shows on two ranks only; the others run on one."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(MODULE)
    made.preload(["weightlane_training_engine_template"])
    yield made
    made.close()


@pytest.mark.parametrize("engine", DEFECTS)
def test_a_broken_training_engine_is_caught_by_the_check_made_for_it(pool: Pool, engine: str) -> None:
    check, complaint = DEFECTS[engine]
    layout = {"ranks": 2 if engine in OF_SEVERAL_RANKS else 1}
    for patience in PATIENCE:
        limits = {limit: patience * seconds for limit, seconds in LIMITS.items()}
        report = run_training_conformance(
            f"{ENGINES}:{engine}", layout, checks=[f"test_{check}"], pool=pool, limits=limits
        )
        (result,) = report.checks
        if result.outcome is CheckOutcome.FAILED and re.search(complaint, result.reason):
            assert result.reason.startswith("expected ")
            return
    pytest.fail(f"not said of {engine}: {complaint}, but {result}")


def test_the_suite_has_the_checks_that_broken_engines_and_the_guide_name_and_no_other() -> None:
    engine_class(f"{ENGINES}:LoadsNothing")
    module = sys.modules["weightlane_conformance_broken_training_engines"]  # as the suite loads it
    classes = {
        name
        for name, cls in vars(module).items()
        if inspect.isclass(cls) and issubclass(cls, TemplateTrainingEngine) and cls is not TemplateTrainingEngine
    }
    assert DEFECTS.keys() == classes
    functions = inspect.getmembers(TrainingEngineConformance, inspect.isfunction)
    checks = {name for name, _ in functions if name.startswith("test_")}
    assert {f"test_{check.partition('[')[0]}" for check, _ in DEFECTS.values()} == checks
    text = (ENGINES.parents[3] / "docs/guides/conformance-of-training-engines.md").read_text()
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    assert {f"test_{name}" for row in rows for name in re.findall(r"`(\w+)`", row)} == checks


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
