"""Checks of outputs: log-probabilities and entropies, without and with a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ..batches import BatchSpec
from ..processes.team import Team
from ..reference import TOP_K, Reference, checkpoint
from .base import PROMPT, SPLIT, TrainingConformanceBase, expect_close, expect_equal

OUTPUT_LIMIT = 1e-5
"""Largest difference of a log-probability or an entropy from float64's: several times a tiny model's error in float32."""

ALL = ("logprobs", "entropy", "hidden")
"""All outputs of a model with its own head."""


class OutputChecks(TrainingConformanceBase):
    """Checks of outputs."""

    def test_outputs_are_those_of_transformers(self, team: Team, each_model: Path) -> None:
        """Sequences have several lengths, temperatures and gaps; over all ranks, each is returned once, under its index.

        In a second batch, some begin with the same tokens, or are equal.
        """
        reference, names = Reference(each_model), (*ALL, "top_logprobs")
        for spec, tokens in ((BatchSpec(calls=SPLIT), 20), (BatchSpec(prompt=PROMPT), 60)):
            team.setup(each_model, micro_batch_tokens=tokens)
            expect_outputs(team.forward(spec, ALL, TOP_K), spec, reference, OUTPUT_LIMIT, names)
        expect_equal(team.tensors(), checkpoint(each_model), "weights after a forward pass")

    def test_every_label_of_a_position_has_its_log_probability(self, team: Team, first_model: Path) -> None:
        """Targets are [T, 3]; some positions lack a label."""
        spec = BatchSpec(labels=3)
        team.setup(first_model, micro_batch_tokens=20)
        expect_outputs(team.forward(spec), spec, Reference(first_model), OUTPUT_LIMIT)

    def test_outputs_beside_a_gradient_are_those_of_forward(self, team: Team, first_model: Path) -> None:
        """``forward_backward`` returns the requested outputs of its own forward pass."""
        spec = BatchSpec(calls=SPLIT)
        team.setup(first_model, micro_batch_tokens=20)
        expect_outputs(team.outputs_beside_gradient(spec), spec, Reference(first_model), OUTPUT_LIMIT)


def expect_outputs(
    found: Sequence[dict[str, torch.Tensor]],
    spec: BatchSpec,
    reference: Reference,
    limit: float,
    names: Sequence[str] = ALL[:2],
) -> None:
    """Check the outputs `names` of every call of `spec`."""
    with torch.no_grad():
        for named, batch in zip(found, spec.batches(), strict=True):
            for index, sequence in enumerate(batch.sequences):
                outputs = reference.outputs(sequence)
                for name in names:
                    what = f"{name} of a sequence of {sequence.length} tokens"
                    assert f"{index}/{name}" in named, f"expected {what}, there is none"
                    if name == "top_logprobs":
                        tokens = named[f"{index}/top_tokens"].tolist()
                        best = outputs["top_tokens"].tolist()
                        assert tokens == best, f"expected {best} as the most probable tokens, they are {tokens}"
                    expect_close(named[f"{index}/{name}"], outputs[name], limit, what)
