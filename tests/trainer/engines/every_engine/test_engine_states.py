"""Engines of critics, engines in training mode, and engines whose state is away, in real processes over gloo."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_batches import make_samples
from engine_gradients import ROWS, THREE_CALLS, assert_gradient_is_exact
from engine_ranks import (
    FSDP2_TP2,
    Teams,
    assert_same,
    checkpoint,
    exhaustive,
    gathered,
    megatron,
)
from transformers import AutoModelForTokenClassification

from weightlane.trainer.engines.registry import training_engine_class

VALUE = {"head": "value"}
MEGATRON = (pytest.mark.megatron, pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="fsdp2"),
        exhaustive(FSDP2_TP2, id="fsdp2-tp2"),
        pytest.param(
            megatron({"tensor_parallel": 2, "sequence_parallel": True}),
            id="megatron-tp2-sp",
            marks=pytest.mark.megatron,
        ),
        pytest.param(megatron({"pipeline_parallel": 2}), id="megatron-pp2", marks=MEGATRON),
    ],
)
def test_a_critic_is_trained_as_transformers_would_and_its_outputs_are_those_of_transformers(
    teams: Teams, settings: dict[str, Any]
) -> None:
    settings = VALUE | settings
    # Errors of values have both signs, so that more rounding is left of their sum.
    assert_gradient_is_exact(teams, 2, "qwen3-critic", settings, ROWS, THREE_CALLS, limit=5e-6, loss="valued")
    ranks, path = teams.of(2), teams.models["qwen3-critic"]
    ranks.setup("qwen3-critic", micro_batch_tokens=20, **settings)
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32).eval()
    found = {index: outputs for answer in ranks.all("values", rows=ROWS) for index, outputs in answer.items()}
    assert sorted(found) == list(range(ROWS))
    for index, sample in enumerate(make_samples(0, ROWS)):
        ids, start = torch.tensor([sample.prompt_ids + sample.completion_ids[:-1]]), len(sample.prompt_ids) - 1
        with torch.no_grad():
            hidden, values = model.model(ids, use_cache=False).last_hidden_state[0], model(ids).logits[0, :, 0]
        np.testing.assert_allclose(found[index]["values"][start:], values[start:], atol=1e-5)
        np.testing.assert_allclose(found[index]["hidden"], hidden, atol=1e-5)
        assert not found[index]["values"][:start].any()


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param(megatron({"tensor_parallel": 2}), marks=MEGATRON)],
    ids=["fsdp2", "megatron"],
)
def test_a_critic_made_of_a_policy_begins_with_values_of_zero_and_is_written_as_transformers_reads_it(
    teams: Teams, tmp_path: Path, settings: dict[str, Any]
) -> None:
    ranks, start = teams.of(2), checkpoint(teams.models["qwen3-untied"])
    ranks.setup("qwen3-untied", **VALUE, **settings)
    for answer in ranks.all("values", rows=3):
        assert not any(outputs["values"].any() for outputs in answer.values())
    body = {name: tensor for name, tensor in start.items() if name != "lm_head.weight"}
    head = {"score.weight": torch.zeros(1, 16), "score.bias": torch.zeros(1)}
    assert_same(gathered(ranks), {**body, **head})
    ranks.all("train", first=0, count=1, loss="valued")
    trained = gathered(ranks)
    assert trained["score.weight"].any()
    ranks.all("save", directory=tmp_path / "state")
    ranks.all("export", directory=tmp_path / "critic")
    assert_same(checkpoint(tmp_path / "critic"), trained)
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForTokenClassification"]
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").num_labels == 1
    engine = training_engine_class(settings.get("engine", "fsdp2"))
    from_state = tmp_path / "from state"
    engine.export_saved(tmp_path / "state", teams.models["qwen3-untied"], from_state, torch.float32, "value")
    assert_same(checkpoint(from_state), trained)
    assert ranks.all("load", directory=teams.models["qwen3-untied"]) == [0, 0]
    assert_same(gathered(ranks), {**body, **head})
    ranks.all("setup", model=tmp_path / "critic", trainer={**VALUE, **settings})
    assert_same(gathered(ranks), trained)
    # Of one rank there is a model, and of the other nothing, or a broken one: neither changes.
    shutil.copytree(teams.models["qwen3-untied"], tmp_path / "of-0")
    ranks.all_fail("ConfigError", "rank 1 sees no model", "load", directory=tmp_path / "of-RANK")
    shutil.copytree(tmp_path / "of-0", tmp_path / "of-1")
    (tmp_path / "of-1" / "model.safetensors").write_bytes(b"")
    ranks.all_fail("ConfigError", "model.safetensors", "load", directory=tmp_path / "of-RANK")
    assert_same(gathered(ranks), trained)
    ranks.all("train", first=0, count=1, loss="valued")


def test_an_output_that_a_head_does_not_have_is_refused(teams: Teams) -> None:
    ranks = teams.of(1)
    ranks.setup("qwen3-critic", **VALUE)
    ranks.all_fail("ProtocolError", "trainer.head=value has no logprobs", "ask", outputs=("logprobs", "values"))
    ranks.all_fail("ProtocolError", "trainer.head=value has no logprobs", "train", first=0, count=1)
    ranks.all_fail("ProtocolError", "top_k is 2; a model with trainer.head=value", "ask", outputs=(), top_k=2)
    assert ranks.all("ask", outputs=("hidden",)) == [["hidden"]]
    ranks.setup("qwen3-tied")
    ranks.all_fail("ProtocolError", "trainer.head=tokens has no values", "ask", outputs=("values",))
    assert ranks.all("ask", outputs=("hidden", "entropy")) == [["entropy", "hidden"]]
    assert ranks.all("ask", outputs=(), top_k=61) == [["top_logprobs", "top_tokens"]]
    ranks.all_fail(
        "ProtocolError", "top_k is 62; a model with trainer.head=tokens of 61 tokens", "ask", outputs=(), top_k=62
    )
    wrong = {"model": teams.models["qwen3-critic"], "trainer": {}}
    ranks.all_fail("ConfigError", "Qwen3ForTokenClassification", "setup", **wrong)


def test_a_frozen_model_computes_but_is_never_trained(teams: Teams) -> None:
    ranks = teams.of(1)
    ranks.setup("qwen3-untied")
    (trainable,) = ranks.all("logprobs")
    ranks.setup("qwen3-untied", frozen=True)
    says = "the model's own weights are frozen, since trainer.frozen is true."
    ranks.all_fail("ConfigError", says, "train", first=0, count=1)
    (frozen,) = ranks.all("logprobs")
    assert frozen.keys() == trainable.keys()
    for index, values in trainable.items():
        np.testing.assert_array_equal(frozen[index], values)


@pytest.mark.megatron
def test_dropout_is_applied_in_training_mode_and_never_by_forward(teams: Teams) -> None:
    ranks = teams.of(1)
    found = {}
    for mode in (True, False):
        ranks.setup("gpt2")
        (found[mode],) = ranks.all("train_with_dropout", mode=mode)
    assert found[False]["losses"][0] == found[False]["losses"][1]
    assert len({*found[True]["losses"], found[False]["losses"][0]}) == 3, "each pass drops something else"
    for index, values in found[True]["logprobs"].items():
        np.testing.assert_array_equal(values, found[False]["logprobs"][index])
    ranks.setup("qwen3-tied", **megatron({}))
    ranks.all_fail("ConfigError", "'megatron' trains without dropout", "train_with_dropout", mode=True)


@pytest.mark.parametrize(
    "settings",
    [
        exhaustive({**FSDP2_TP2, "compute_dtype": "bfloat16"}, id="fsdp2-tp2"),
        pytest.param(
            megatron({"distributed_optimizer": True}, compute_dtype="bfloat16"),
            id="megatron-dp2-distributed",
            marks=pytest.mark.megatron,
        ),
    ],
)
def test_a_state_that_was_away_is_the_same_bit_for_bit_and_is_missed_meanwhile(
    teams: Teams, settings: dict[str, Any]
) -> None:
    """FSDP2 on two ranks does so in the conformance suite."""
    weights, reports = {}, {}
    for parts in ((), ("gradients",), ("optimizer",), ("parameters", "gradients", "optimizer")):
        ranks = teams.of(2)
        ranks.setup("qwen3-untied", **settings)
        reports[parts] = ranks.all("offload_and_train", parts=parts)
        weights[parts] = gathered(ranks)
    nothing = reports.pop(())
    whole = sum(tensor.nbytes for tensor in weights[()].values())
    for parts, answers in reports.items():
        assert_same(weights[parts], weights[()])
        for answer, expected in zip(answers, nothing, strict=True):
            assert (answer["norms"], answer["loss"]) == (expected["norms"], expected["loss"])
            assert (answer["left"] == 0) == ("parameters" in parts)
            assert expected["left"] >= whole / 4
            assert len(answer["said"]) == 4
            assert all(f"the {' and the '.join(parts)} of the model are offloaded" in said for said in answer["said"])


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("megatron", marks=pytest.mark.megatron)])
def test_weights_that_do_not_fit_their_config_are_refused(
    teams: Teams, models: dict[str, Path], tmp_path: Path, engine: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models["qwen3-tied"], broken)
    config = json.loads((broken / "config.json").read_text())
    layers = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    (broken / "config.json").write_text(json.dumps({**config, **layers}))
    says = "missing keys model.layers.4."
    teams.of(1).all_fail("ConfigError", says, "setup", model=broken, trainer={"engine": engine})
