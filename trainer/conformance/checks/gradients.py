"""Checks of gradients. The contract has no call that returns one, so a check takes a step from which it can be computed.

With both decay rates 0, AdamW changes a weight by the learning rate times ``u = g / (|g| + eps)``, so that
``g = eps * u / (1 - |u|)``. A scaled-down loss makes every ``g`` small compared to ``eps``, which is torch's 1e-8, and a very
large learning rate makes the change large compared to the weight. The change then gives ``g`` to float32's full precision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightlane.ckpt_engines import ProtocolError

from ..batches import BatchSpec
from ..processes.team import Team
from ..reference import Reference, checkpoint
from .base import PROMPT, SPLIT, TrainingConformanceBase, distance, expect_equal

GRADIENT_LIMIT = 1e-6
"""Largest difference of a gradient from float64's, relative to its length: the error of float32."""
HALF_LIMIT = 0.05
"""The same limit for forward and backward in bfloat16."""
_EPS = 1e-8
_SCALE = 1e-10
_RATE = 1e9
READABLE: dict[str, Any] = {
    "learning_rate": _RATE,
    "betas": (0.0, 0.0),
    "weight_decay": 0.0,
    "max_grad_norm": 1e9,
    "micro_batch_tokens": 20,
}
"""Settings with which the gradient can be computed from a step."""


class GradientChecks(TrainingConformanceBase):
    """Checks of gradients."""

    @pytest.mark.parametrize(
        ("spec", "tokens"),
        [
            (BatchSpec(), 20),
            (BatchSpec(calls=((2, 5), (4, 0, 6))), 20),
            (BatchSpec(calls=SPLIT[1:], prompt=PROMPT), 60),
        ],
        ids=["one call", "some left out", "prompts of several sequences"],
    )
    def test_the_gradient_of_a_mini_batch_is_that_of_one_process(
        self, team: Team, first_model: Path, spec: BatchSpec, tokens: int
    ) -> None:
        """The loss's three terms are divided by the full mini-batch's tokens, its sequences, and a constant."""
        team.setup(first_model, **{**READABLE, "micro_batch_tokens": tokens})
        expect_gradient(team, first_model, spec)

    def test_the_gradient_does_not_depend_on_the_split_into_calls_and_micro_batches(
        self, team: Team, each_model: Path
    ) -> None:
        """The gradient of three uneven calls is that of the reference, on every model."""
        team.setup(each_model, **READABLE)
        expect_gradient(team, each_model, BatchSpec(calls=SPLIT))

    def test_a_rank_without_a_sequence_takes_part(self, team: Team, first_model: Path) -> None:
        """The mini-batch has one sequence, with several labels for each of its positions."""
        team.setup(first_model, **READABLE)
        expect_gradient(team, first_model, BatchSpec(rows=1, labels=2))

    def test_half_precision_is_for_computing_only(self, team: Team, first_model: Path) -> None:
        """With ``compute_dtype = "bfloat16"`` the weights stay float32, and the gradient is that of rounded weights."""
        team.setup(first_model, **READABLE, compute_dtype="bfloat16")
        expect_equal(team.tensors(), checkpoint(first_model), "float32 weights of an engine that computes in bfloat16")
        expect_gradient(team, first_model, BatchSpec(calls=SPLIT), HALF_LIMIT)

    @pytest.mark.parametrize("wrong", ["token", "target"])
    def test_what_the_model_does_not_have_is_refused_and_leaves_no_gradient(
        self, team: Team, first_model: Path, wrong: str
    ) -> None:
        """A token or target beyond the vocabulary in a mini-batch's second call also drops the gradient of the first."""
        team.setup(first_model, **READABLE)
        broken = BatchSpec(seed=1, calls=((0, 1, 2, 3), (4, 5, 6)), wrong=wrong)
        team.all_fail(ProtocolError, "forward_backward", batch=broken)
        team.all_fail(ProtocolError, "forward", batch=broken, outputs=["logprobs"], file="")
        expect_gradient(team, first_model, BatchSpec())

    def test_a_mini_batch_is_fixed_until_the_step(self, team: Team, first_model: Path) -> None:
        """Another mini-batch before the step is refused on every rank, also an equal one: gradients would be added."""
        team.setup(first_model)
        team.forward_backward(BatchSpec())
        team.all_fail(ProtocolError, "forward_backward", batch=BatchSpec(seed=1, rows=3))
        team.all_fail(ProtocolError, "forward_backward", batch=BatchSpec(), counted=False)


def expect_gradient(team: Team, path: Path, spec: BatchSpec, limit: float = GRADIENT_LIMIT) -> None:
    """Check loss and gradient of a mini-batch, in an engine that was set up with `READABLE`."""
    losses, wanted = Reference(path).gradient(spec)
    before = team.tensors()
    metrics = team.forward_backward(spec, scale=_SCALE)
    reports = team.all("optim_step")
    assert not any(report["error"] for report in reports), f"expected a step, it raised {reports[0]['error']}"
    after = team.tensors()
    size = sum(abs(value) for value in losses.values())
    for name, value in losses.items():
        found = sum(each.get(name, float("nan")) for each in metrics) / _SCALE
        assert abs(found - value) <= max(limit, 2e-6) * size, (
            f"expected {value:.7g} as {name} of all calls, it is {found:.7g}"
        )
    tokens = float(sum(batch.target_tokens for batch in spec.batches()))
    told = sum(each.get("tokens", 0.0) for each in metrics)
    assert told == tokens, f"expected {tokens:g} tokens in the metrics of all calls, they are {told:g}"
    gradient = {}
    for name in wanted:
        update = (before[name].double() - after[name].double()) / _RATE
        gradient[name] = _EPS * update / (1 - update.abs()) / _SCALE
    distance(gradient, wanted, limit, "the gradient")
    length = float(sum(tensor.square().sum() for tensor in wanted.values())) ** 0.5
    norm = reports[0]["norm"] / _SCALE
    assert abs(norm - length) <= max(limit, 1e-5) * length, f"expected the gradient norm {length:.7g}, it is {norm:.7g}"
