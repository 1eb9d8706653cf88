"""Engines of critics, engines in training mode, losses that fail, and parameters that stay gathered, over gloo."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_batches import PREFIX, PREFIXED, make_samples
from engine_ranks import (
    FSDP2_CP2,
    FSDP2_TP2,
    Teams,
    assert_same,
    case,
    checkpoint,
    exhaustive,
    gathered,
    megatron,
    whole,
)
from transformers import AutoModelForTokenClassification

from weightlane.trainer.engines import offloading
from weightlane.trainer.engines.registry import training_engine_class

VALUE = {"head": "value"}
ROWS, CALLS = 7, [[0], [3, 1, 2, 4], [6, 5]]


@pytest.mark.parametrize(
    "settings",
    [
        exhaustive({}, id="fsdp2"),
        exhaustive(FSDP2_TP2, id="fsdp2-tp2"),
        exhaustive(FSDP2_CP2, id="fsdp2-cp2"),
        case(megatron({"tensor_parallel": 2, "sequence_parallel": True}), id="megatron-tp2-sp"),
        exhaustive(megatron({"pipeline_parallel": 2}), id="megatron-pp2"),
    ],
)
def test_a_critic_is_trained_as_transformers_would_and_its_outputs_are_those_of_transformers(
    teams: Teams, settings: dict[str, Any]
) -> None:
    """In float64. Micro-batches and tokens per rank are uneven; the loss is `engine_batches.valued`, written out once more."""
    ranks, path, samples = teams.of(2), teams.models["qwen3-critic"], make_samples(0, ROWS)
    exact_steps = {"betas": (0.0, 0.999), "max_grad_norm": 1e9, "micro_batch_tokens": 40}
    ranks.setup("qwen3-critic", **VALUE, **exact_steps, **settings)
    answers = ranks.all("forward", rows=ROWS, outputs=("values", "hidden"))
    found = {index: outputs for answer in answers for index, outputs in answer.items()}
    assert sorted(found) == list(range(ROWS))
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float64).eval()
    tokens = sum(len(sample.completion_ids) for sample in samples)
    loss = torch.zeros((), dtype=torch.float64)
    for index, sample in enumerate(samples):
        ids, start = torch.tensor([sample.prompt_ids + sample.completion_ids[:-1]]), len(sample.prompt_ids) - 1
        hidden = model.model(ids, use_cache=False).last_hidden_state[0]
        values = model.score(hidden)[:, 0]
        np.testing.assert_allclose(found[index]["values"][start:], values[start:].detach(), atol=1e-5)
        np.testing.assert_allclose(found[index]["hidden"], hidden.detach(), atol=1e-5)
        assert not found[index]["values"][:start].any()
        errors = values[start:] - float(np.float32(sample.advantage))  # in which it travels
        loss = loss + errors.square().sum() / tokens + (hidden[start:] * torch.linspace(-1, 1, 16)).sum() / 70
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    answers = ranks.all("gradient", rows=ROWS, calls=CALLS, loss="valued")
    assert [total for total, _ in answers] == [pytest.approx(float(loss.detach()), rel=5e-6)] * 2
    gradient = whole([[(name, wanted[name].shape, *rest) for name, *rest in slices] for _, slices in answers])
    apart = sum(float((gradient[name] - each).square().sum()) for name, each in wanted.items())
    # Errors of values have both signs, so that more rounding is left of their sum than of other losses'.
    assert apart <= 5e-6**2 * sum(float(each.square().sum()) for each in wanted.values())


@pytest.mark.parametrize("settings", [{}, exhaustive(megatron({"tensor_parallel": 2}))], ids=["fsdp2", "megatron"])
def test_a_critic_made_of_a_policy_begins_with_values_of_zero_and_is_written_as_transformers_reads_it(
    teams: Teams, tmp_path: Path, settings: dict[str, Any]
) -> None:
    ranks, start = teams.of(2), checkpoint(teams.models["qwen3-untied"])
    ranks.setup("qwen3-untied", **VALUE, **settings)
    for answer in ranks.all("forward", rows=3, outputs=("values",)):
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

    def answered(**asked: Any) -> set[str]:
        (found,) = ranks.all("forward", **asked)
        return {name for each in found.values() for name in each}

    ranks.setup("qwen3-critic", **VALUE)
    ranks.all_fail("ProtocolError", "trainer.head=value has no logprobs", "forward", outputs=("logprobs", "values"))
    ranks.all_fail("ProtocolError", "trainer.head=value has no logprobs", "train", first=0, count=1)
    ranks.all_fail("ProtocolError", "top_k is 2; a model with trainer.head=value", "forward", outputs=(), top_k=2)
    assert answered(outputs=("hidden",)) == {"hidden"}
    ranks.setup("qwen3-tied")
    ranks.all_fail("ProtocolError", "trainer.head=tokens has no values", "forward", outputs=("values",))
    assert answered(outputs=("hidden", "entropy")) == {"entropy", "hidden"}
    assert answered(outputs=(), top_k=61) == {"top_logprobs", "top_tokens"}
    ranks.all_fail(
        "ProtocolError", "top_k is 62; a model with trainer.head=tokens of 61 tokens", "forward", outputs=(), top_k=62
    )
    wrong = {"model": teams.models["qwen3-critic"], "trainer": {}}
    ranks.all_fail("ConfigError", "Qwen3ForTokenClassification", "setup", **wrong)


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
    (packed, read), (with_dropout, _) = found[False]["tokens"], found[True]["tokens"]
    assert read - packed == (len(PREFIXED) - 1) * len(PREFIX)
    assert with_dropout == read, "each sequence drops other activations of a prefix that they share"
    ranks.setup("qwen3-tied", **megatron({}))
    ranks.all_fail("ConfigError", "'megatron' trains without dropout", "train_with_dropout", mode=True)


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


OVERLAP = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize("settings", [{}, exhaustive(megatron(OVERLAP))], ids=["fsdp2", "megatron"])
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
    before = ranks.all("forward")
    assert_same(gathered(ranks), checkpoint(teams.models["qwen3-tied"]))
    ranks.all("train", first=0, count=1)
    trained = ranks.all("forward")
    ranks.all("load", directory=tmp_path / "state")
    for mine, first, other in zip(ranks.all("forward"), before, trained, strict=True):
        for index, values in mine.items():
            np.testing.assert_array_equal(values["logprobs"], first[index]["logprobs"])
            assert (values["logprobs"] != other[index]["logprobs"]).any()


def test_the_guides_way_without_a_run_trains(teams: Teams) -> None:
    guide = Path(__file__).parents[3] / "docs/guides/your-own-loss.md"
    block = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)[1]
    ranks = teams.of(2)
    ranks.setup("qwen3-tied")
    first, second = ranks.all("run_code", code=block)[0], ranks.all("run_code", code=block)[0]
    assert (first["tokens"], second["loss"] < first["loss"]) == (3.0, True)


def test_offloaded_state_takes_exactly_its_bytes_of_pinned_memory_which_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where torch pins memory itself, each tensor takes the next power of two of bytes, also while it is not offloaded."""
    asked: list[int] = []

    def pinned_memory(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    runtime = SimpleNamespace(has_streams=True, host_memory=pinned_memory)
    monkeypatch.setattr(offloading, "runtime_of", lambda _: runtime)
    tensors = [torch.arange(5.0), torch.arange(3, dtype=torch.int16)]
    pinned: dict[torch.device, torch.Tensor] = {}
    values = [tensor.clone() for tensor in tensors]
    for moved in ([*tensors, tensors[0][1:]], tensors, tensors[:1]):
        copies = offloading.HostCopies(moved, pinned)
        assert not tensors[0].untyped_storage().nbytes()
        copies.restore()
        assert all(map(torch.equal, tensors, values))
    assert asked == [5 * 4 + 3 * 2, 5 * 4]
