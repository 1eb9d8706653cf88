"""Checks of optimizer steps, and of their calls to the fence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weightlane.ckpt_engines import ProtocolError, WeightlaneError

from ..batches import BatchSpec
from ..processes.rank_process import FENCE_FAILED
from ..processes.team import Team
from ..reference import NEVER_TRAINED, Reference, checkpoint
from .base import TrainingConformanceBase, expect_equal, expect_same_change
from .outputs import expect_outputs

STEP_LIMIT = 1e-4
"""Largest difference of the change of all weights from float64's, relative to its length."""
SMOOTH: dict[str, Any] = {
    "learning_rate": 1e-2,
    "lr_warmup_steps": 2,
    "betas": (0.8, 0.9),
    "weight_decay": 0.1,
    "max_grad_norm": 1e-6,
    "micro_batch_tokens": 20,
}
"""Settings with which an error in a gradient makes an error of the same size in the step.

Clipped to this norm, an element of the gradient is about as large as AdamW's ``eps``. Where it is much larger, a step is almost
the gradient's sign, and tells little of the gradient.
"""


class StepChecks(TrainingConformanceBase):
    """Checks of optimizer steps and of the fence."""

    def test_steps_are_those_of_adamw(self, team: Team, first_model: Path) -> None:
        """Three steps with clipping, warm-up and weight decay; then outputs are those of the new weights."""
        start, reference = checkpoint(first_model), Reference(first_model)
        specs = [BatchSpec(seed) for seed in range(3)]
        team.setup(first_model, **SMOOTH)
        norms = [team.step(spec) for spec in specs]
        wanted = reference.train(specs, SMOOTH)
        for number, (found, exact) in enumerate(zip(norms, wanted, strict=True)):
            assert math.isclose(found, exact, rel_tol=STEP_LIMIT), (
                f"expected the norm before clipping, {exact:.7g}, of step {number}, it is {found:.7g}"
            )
        expect_same_change(team.tensors(), reference.tensors(), start, STEP_LIMIT, "the change by three steps")
        counts = team.all("steps")
        assert counts == [3] * len(counts), f"expected every rank to have taken 3 steps, they say {counts}"
        expect_outputs(team.forward(specs[0]), specs[0], reference, STEP_LIMIT)

    def test_a_step_may_have_settings_of_its_own(self, team: Team, first_model: Path) -> None:
        """All settings in `AdamParams` replace those of the configuration."""
        reference, specs = Reference(first_model), [BatchSpec(seed) for seed in range(2)]
        params = {
            name: value for name, value in SMOOTH.items() if name not in ("lr_warmup_steps", "micro_batch_tokens")
        }
        team.setup(first_model, learning_rate=1.0, lr_warmup_steps=9, betas=(0.1, 0.2), micro_batch_tokens=20)
        for spec in specs:
            team.step(spec, params)
        reference.train(specs, {**params, "lr_warmup_steps": 0})
        what = "the change by two steps with settings of their own"
        expect_same_change(team.tensors(), reference.tensors(), checkpoint(first_model), STEP_LIMIT, what)

    def test_the_fence_is_told_of_each_tensor_once_before_it_changes(self, team: Team, first_model: Path) -> None:
        """The fence gets the names of changing tensors only, in the order of the shards, in the same calls on every rank."""
        team.setup(first_model, **SMOOTH)
        order = list(dict.fromkeys(shard["name"] for shard, _ in team.shards()[0]))
        team.forward_backward(BatchSpec())
        reports = team.all("optim_step")
        calls = [[call["named"] for call in report["calls"]] for report in reports]
        assert all(each == calls[0] for each in calls), f"expected the same calls of the fence on every rank: {calls}"
        named = [name for call in calls[0] for name in call]
        assert len(named) == len(set(named)), f"expected each tensor once, the fence was told of {named}"
        trained = [name for name in order if not name.endswith(NEVER_TRAINED)]
        assert named == trained, f"expected the fence to be told of {trained}, in this order; it was told of {named}"
        for rank, report in zip(team.ranks, reports, strict=True):
            assert not report["error"], f"expected a step, it raised {report['error']}"
            known: set[str] = set()
            for number, call in enumerate(report["calls"]):
                early = set(call["changed"]) - known
                assert not early, (
                    f"expected no change before the fence, in {rank.name} call {number} came after {early}"
                )
                known |= set(call["named"])
            assert report["step"] == 1, f"expected 1 step in {rank.name}, it says {report['step']}"
        changed = {name for report in reports for name in report["changed"]}
        assert changed == set(named), f"expected every named tensor to change, {set(named) - changed} did not"

    def test_a_step_without_a_gradient_is_refused(self, team: Team, first_model: Path) -> None:
        """Every rank raises `ProtocolError` before the fence: without a gradient, after a wrong batch, and after `zero_grad`."""
        team.setup(first_model, **SMOOTH)
        for before in ("nothing", "a wrong token", "zero_grad"):
            if before == "a wrong token":
                team.all_fail(ProtocolError, "forward_backward", batch=BatchSpec(wrong="token"))
            elif before == "zero_grad":
                team.forward_backward(BatchSpec(1))
                team.all("zero_grad")
            reports = team.all("optim_step")
            expect_nothing_changed(reports, "ProtocolError")
            assert not any(report["calls"] for report in reports), "expected no call of the fence, there was one"
        expect_equal(team.tensors(), checkpoint(first_model), "weights after a step that was refused")
        team.step(BatchSpec())

    def test_a_step_whose_fence_fails_changes_nothing(self, team: Team, first_model: Path) -> None:
        """``optim_step`` raises the fence's error, and a step for a new gradient succeeds."""
        team.setup(first_model, **SMOOTH)
        team.forward_backward(BatchSpec())
        expect_nothing_changed(team.all("optim_step", fail_at=0), f"WeightlaneError: {FENCE_FAILED}")
        expect_equal(team.tensors(), checkpoint(first_model), "weights after a fence that failed")
        team.step(BatchSpec())

    def test_a_step_that_stops_half_way_leaves_an_engine_that_only_loads(
        self, team: Team, first_model: Path, tmp_path: Path
    ) -> None:
        """The fence fails in its second call. A state that is then loaded continues as usual."""
        team.setup(first_model, **SMOOTH)
        team.step(BatchSpec(1))
        team.all("save", directory=tmp_path / "state")
        team.forward_backward(BatchSpec())
        reports = team.all("optim_step", fail_at=1)
        if not any(report["error"] for report in reports):
            pytest.skip("the engine tells the fence of all tensors at once")
        for report in reports:
            assert FENCE_FAILED in report["error"], f"expected the fence's error, it was {report['error']}"
        team.all_fail(WeightlaneError, "forward_backward", batch=BatchSpec())
        team.all_fail(WeightlaneError, "save", directory=tmp_path / "torn")
        team.all("load", directory=tmp_path / "state")
        norm, after = team.step(BatchSpec()), team.tensors()
        team.all("load", directory=tmp_path / "state")
        again = team.step(BatchSpec())
        assert again == norm, f"expected the same step from the same state, the gradient norms are {norm} and {again}"
        expect_equal(team.tensors(), after, "weights after the same step from the same state")

    def test_a_gradient_that_is_not_finite_changes_nothing(self, team: Team, first_model: Path) -> None:
        """``GradientError`` on every rank, before the fence; the next step succeeds."""
        team.setup(first_model, **SMOOTH)
        team.all("forward_backward", batch=BatchSpec(), scale=math.inf)
        reports = team.all("optim_step")
        expect_nothing_changed(reports, "GradientError")
        assert not any(report["calls"] for report in reports), "expected no call of the fence, there was one"
        expect_equal(team.tensors(), checkpoint(first_model), "weights after a gradient that is not finite")
        team.step(BatchSpec())


def expect_nothing_changed(reports: list[Mapping[str, Any]], error: str) -> None:
    """Check that a step raised `error` on every rank, changed nothing, and was not counted."""
    for number, report in enumerate(reports):
        said = report["error"] or "nothing"
        assert report["error"].startswith(error), f"expected {error} from rank {number}, it raised {said}"
        assert not report["changed"], f"expected nothing to change on rank {number}, it changed {report['changed']}"
        assert report["step"] == 0, f"expected no step to be counted on rank {number}, it says {report['step']}"
