"""The gradient of a mini-batch does not depend on how it is split: against one process of transformers in float64."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_batches import TEMPERATURE, make_samples
from engine_gradients import ROWS, SPLITS, assert_gradient_is_exact
from engine_ranks import FSDP2_TP2, Teams, assert_same, checkpoint, exhaustive, gathered, megatron
from transformers import AutoModelForCausalLM

LAYOUTS = [
    exhaustive(1, "qwen3-tied", {}, id="fsdp2"),
    pytest.param(2, "qwen3-tied", {}, id="fsdp2, 2 ranks"),
    exhaustive(4, "llama-untied", {}, id="fsdp2, 4 ranks"),
    pytest.param(2, "llama-untied", FSDP2_TP2, id="fsdp2, tp2"),
    exhaustive(2, "qwen3-moe", {}, id="fsdp2, 2 ranks, experts"),
    *(
        pytest.param(2, name, megatron(layout), id=f"megatron, {id_}", marks=pytest.mark.megatron)
        for name, layout, id_ in (
            ("qwen2", {"tensor_parallel": 2, "sequence_parallel": True}, "tp2"),
            ("qwen3-tied", {"pipeline_parallel": 2}, "pp2"),
            ("qwen3-moe", {"expert_parallel": 2}, "ep2"),
            ("qwen3-untied", {"distributed_optimizer": True}, "dp2"),
        )
    ),
]


@pytest.mark.parametrize("calls", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(("world", "name", "settings"), LAYOUTS)
def test_the_gradient_is_that_of_one_process_in_float64(
    teams: Teams, world: int, name: str, settings: dict[str, Any], calls: list[list[int]]
) -> None:
    """Micro-batches and tokens per rank are uneven, and terms are means over tokens, over sequences, and by a constant."""
    assert_gradient_is_exact(teams, world, name, settings, ROWS, calls, limit=1e-6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("qwen3-tied", {}), pytest.param("qwen3-untied", megatron({}), marks=pytest.mark.megatron)],
    ids=["fsdp2", "megatron"],
)
def test_ranks_without_a_sequence_and_half_precision_change_it_no_more_than_rounding(
    teams: Teams, name: str, settings: dict[str, Any]
) -> None:
    assert_gradient_is_exact(teams, 2, name, settings, 1, [[0]], limit=1e-6)
    half = {**settings, "compute_dtype": "bfloat16"}
    assert_gradient_is_exact(teams, 2, name, half, ROWS, SPLITS["three calls"], limit=0.05)


@pytest.mark.parametrize("settings", [{}, FSDP2_TP2, megatron({"pipeline_parallel": 2})], ids=["fsdp2", "tp2", "pp2"])
def test_outputs_come_by_sequence_and_are_those_of_transformers(teams: Teams, settings: dict[str, Any]) -> None:
    ranks = teams.of(2)
    ranks.setup("llama-untied", micro_batch_tokens=20, **settings)
    model = AutoModelForCausalLM.from_pretrained(teams.models["llama-untied"], dtype=torch.float32).eval()
    answers = ranks.all("outputs", rows=ROWS)
    found = {index: values for answer in answers for index, values in answer.items()}
    assert sorted(index for answer in answers for index in answer) == list(range(ROWS)), "each from one rank"
    for index, sample in enumerate(make_samples(0, ROWS)):
        ids, start = torch.tensor([sample.prompt_ids + sample.completion_ids]), len(sample.prompt_ids) - 1
        with torch.no_grad():
            logs = torch.log_softmax(model(ids, use_cache=False).logits[0, start:-1] / TEMPERATURE, -1)
        wanted = logs[range(len(sample.completion_ids)), list(sample.completion_ids)]
        np.testing.assert_allclose(found[index]["logprobs"][start:], wanted, atol=1e-5)
        np.testing.assert_allclose(found[index]["entropy"][start:], -(logs.exp() * logs).sum(1), atol=1e-5)
        best = logs.topk(3)
        np.testing.assert_array_equal(found[index]["top_tokens"][start:], best.indices)
        np.testing.assert_allclose(found[index]["top_logprobs"][start:], best.values, atol=1e-5)
        np.testing.assert_array_equal(found[index]["logprobs"], found[index]["beside"])
        assert not found[index]["logprobs"][:start].any()


@pytest.mark.parametrize(
    "settings", [{}, pytest.param(megatron({}), marks=pytest.mark.megatron)], ids=["fsdp2", "megatron"]
)
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("token", "token of token 0 (id 99) of sequence 3 is 99. The model has tokens 0 to 60"),
        ("target", "of sequence 3 is 99. The model has tokens 0 to 60"),
        ("loss", "the loss failed."),
    ],
)
def test_a_call_that_fails_leaves_no_gradient_of_its_mini_batch(
    teams: Teams, settings: dict[str, Any], how: str, says: str
) -> None:
    ranks = teams.of(2)
    ranks.setup("qwen3-untied", micro_batch_tokens=8, **settings)
    assert all(says in error for error in ranks.all("fail", how=how))
    after = ranks.all("train", first=0, count=1)
    ranks.setup("qwen3-untied", micro_batch_tokens=8, **settings)
    assert ranks.all("train", first=0, count=1) == after


@pytest.mark.parametrize("reshard", [True, False])
def test_outputs_follow_the_parameters_and_leave_the_shards_as_they_are(
    teams: Teams, tmp_path: Path, reshard: bool
) -> None:
    """Also where parameters stay gathered after a forward pass: copies of them must not outlive a change of the shards."""
    ranks = teams.of(2)
    ranks.setup("qwen3-tied", reshard_after_forward=reshard)
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


def test_a_mini_batch_is_fixed_by_its_first_call(teams: Teams) -> None:
    ranks = teams.of(1)
    ranks.setup("qwen3-tied")
    ranks.all_fail(
        "ProtocolError", "Pass the same mini_batch to every forward_backward until optim_step", "change_mini_batch"
    )
