"""Gradients, beyond the layouts and models of the conformance suite: against one process of transformers in float64."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_gradients import ROWS, THREE_CALLS, assert_gradient_is_exact
from engine_ranks import Teams, assert_same, checkpoint, gathered, megatron

MEGATRON = pytest.mark.megatron


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("qwen2", {"tensor_parallel": 2, "sequence_parallel": True}, id="tp2", marks=MEGATRON),
        pytest.param("qwen3-tied", {"pipeline_parallel": 2}, id="pp2", marks=(MEGATRON, pytest.mark.exhaustive)),
        pytest.param("qwen3-moe", {"expert_parallel": 2}, id="ep2", marks=(MEGATRON, pytest.mark.exhaustive)),
    ],
)
def test_the_gradient_is_that_of_one_process_in_float64(teams: Teams, name: str, layout: dict[str, Any]) -> None:
    """Micro-batches and tokens per rank are uneven, and terms are means over tokens, over sequences, and by a constant."""
    assert_gradient_is_exact(teams, 2, name, megatron(layout), ROWS, THREE_CALLS, limit=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param(megatron({}), marks=(MEGATRON, pytest.mark.exhaustive))],
    ids=["fsdp2", "megatron"],
)
def test_a_loss_that_fails_leaves_no_gradient_of_its_mini_batch(teams: Teams, settings: dict[str, Any]) -> None:
    ranks = teams.of(2)
    ranks.setup("qwen3-untied", micro_batch_tokens=8, **settings)
    assert all("the loss failed." in error for error in ranks.all("fail"))
    after = ranks.all("train", first=0, count=1)
    ranks.setup("qwen3-untied", micro_batch_tokens=8, **settings)
    assert ranks.all("train", first=0, count=1) == after


def test_outputs_follow_the_parameters_and_leave_the_shards_as_they_are(teams: Teams, tmp_path: Path) -> None:
    """Parameters stay gathered after a forward pass here: copies of them must not outlive a change of the shards."""
    ranks = teams.of(2)
    ranks.setup("qwen3-tied", reshard_after_forward=False)
    ranks.all("save", directory=tmp_path / "state")
    before = ranks.all("logprobs")
    assert_same(gathered(ranks), checkpoint(teams.models["qwen3-tied"]))
    ranks.all("train", first=0, count=1)
    trained = ranks.all("logprobs")
    ranks.all("load", directory=tmp_path / "state")
    for mine, first, other in zip(ranks.all("logprobs"), before, trained, strict=True):
        for index, values in mine.items():
            np.testing.assert_array_equal(values, first[index])
            assert (values != other[index]).any()


def test_the_guides_way_without_a_run_trains(teams: Teams) -> None:
    guide = Path(__file__).parents[4] / "docs/guides/your-own-loss.md"
    block = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)[1]
    ranks = teams.of(2)
    ranks.setup("qwen3-tied")
    first, second = ranks.all("run_code", code=block)[0], ranks.all("run_code", code=block)[0]
    assert (first["tokens"], second["loss"] < first["loss"]) == (3.0, True)
