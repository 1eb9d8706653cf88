"""Adapters compute and train as PEFT's do, leave everything else as it is, and travel in PEFT's files: in both engines."""

from __future__ import annotations

import json
import math
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import peft_oracle
import pytest
import torch
from engine_batches import make_samples
from engine_ranks import FSDP2_CP2, FSDP2_TP2, Ranks, Teams, assert_same, case, exhaustive, gathered, megatron, whole
from safetensors.torch import load_file, save_file

from weightlane.ckpt_engines import ConfigError
from weightlane.rollout.config import RolloutConfig
from weightlane.trainer.config import LoraConfig, TrainerConfig
from weightlane.trainer.engines.lora.adapter import Adapter, LoraGroups
from weightlane.trainer.engines.lora.sites import LoraSite
from weightlane.trainer.engines.optimizers.settings import AdamParams

pytestmark = pytest.mark.skipif(not peft_oracle.PEFT.is_dir(), reason="PEFT is not installed (see .ci/setup-env)")

ROWS = 7
SHAPE = {"rank": 4, "alpha": 6.0}
RECOMPUTED = {"activation_checkpointing": True}
DEEPSEEK = ("deepseek-v2", "deepseek-v3", "glm4-moe", "glm4-moe-lite")
MODELS = ("qwen3-tied", "qwen2", "llama-untied", "qwen3-moe", *DEEPSEEK, "glm4", "gpt-oss")
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj"}
ALL = {"q_proj", "k_proj", "v_proj", "o_proj", *FEED_FORWARD}
KEYS_VALUES = {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *FEED_FORWARD}
OTHER = {
    "glm4": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"},
    "gpt-oss": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "deepseek-v2": {"q_proj", *KEYS_VALUES},
    **{key: {"q_a_proj", "q_b_proj", *KEYS_VALUES} for key in ("deepseek-v3", "glm4-moe-lite")},
}

SPLIT = {"tensor_parallel": 2, "sequence_parallel": True}
SEQUENCES = megatron(SPLIT)
LAYOUTS = [
    exhaustive("qwen2", 2, RECOMPUTED, id="fsdp2-2, recomputed"),
    exhaustive("llama-untied", 2, {"fsdp2": {"tensor_parallel": 2, "packing": "off"}}, id="fsdp2-tp2, padded"),
    exhaustive("qwen3-tied", 2, {**FSDP2_CP2, **RECOMPUTED}, id="fsdp2-cp2, recomputed"),
    case("qwen3-moe", 2, RECOMPUTED, id="fsdp2-2, experts, recomputed"),
    exhaustive("deepseek-v3", 2, {}, id="fsdp2-2, experts, latent"),
    exhaustive("qwen3-moe", 2, FSDP2_TP2, id="fsdp2-tp2, experts"),
    exhaustive("deepseek-v2", 1, {"fsdp2": {"packing": "off"}}, id="fsdp2-1, experts, latent, padded"),
    exhaustive("qwen2", 2, {**SEQUENCES, **RECOMPUTED}, id="megatron-sp2, recomputed"),
    exhaustive("qwen3-tied", 2, megatron({"pipeline_parallel": 2}), id="megatron-pp2"),
    case("deepseek-v3", 2, {**megatron({**SPLIT, "expert_parallel": 2}), **RECOMPUTED}, id="experts, latent, sp2, ep2"),
    exhaustive("deepseek-v2", 2, megatron({"pipeline_parallel": 2}), id="experts, latent, pp2"),
    exhaustive("qwen3-moe", 2, megatron({}), id="experts, dp2"),
    exhaustive("qwen3-moe", 4, megatron({"expert_parallel": 2}), id="experts, dp4, ep2"),
    exhaustive(
        "qwen3-moe",
        4,
        megatron({"expert_parallel": 2, "grouped_gemm": True}, compute_dtype="float32", **RECOMPUTED),
        id="grouped experts, dp4, ep2, recomputed",
    ),
    exhaustive("deepseek-v3", 4, megatron({"expert_parallel": 4}), id="experts, latent, ep4"),
    exhaustive("deepseek-v2", 4, megatron({**SPLIT, "expert_parallel": 4}), id="experts, latent, sp2, ep4"),
    exhaustive(
        "deepseek-v3", 4, megatron({"pipeline_parallel": 2, "expert_parallel": 2}), id="experts, latent, pp2, ep2"
    ),
    exhaustive("glm4-moe", 2, megatron({**SPLIT, "expert_parallel": 2}), id="glm4-moe, sp2, ep2"),
    exhaustive("glm4-moe-lite", 2, megatron({"expert_parallel": 2}), id="glm4-moe-lite, ep2"),
    exhaustive("glm4", 2, SEQUENCES, id="glm4, sp2"),
    exhaustive("glm4", 2, megatron({"tensor_parallel": 2}), id="glm4, tp2"),
    exhaustive("gpt-oss", 2, megatron({**SPLIT, "expert_parallel": 2}), id="gpt-oss, sp2, ep2"),
]
"""The model, and the number of ranks and their settings."""
ONE_STEP = (("forward_backward", 0), ("forward_backward", 1), ("optim_step", 0))
"""Calls of a step, as `adapter_steps` takes them, without the adapter."""


@pytest.fixture(scope="module")
def made(oracle: Ranks, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter by PEFT for each model, beside all its linear layers, and one beside some of those of qwen3-tied."""
    root = tmp_path_factory.mktemp("adapters")
    found = {name: root / name for name in MODELS}
    for seed, (name, directory) in enumerate(found.items()):
        oracle.all("make", model=models[name], directory=directory, seed=seed, r=4, lora_alpha=6)
    found["some"] = root / "some"
    some = {
        "model": models["qwen3-tied"],
        "directory": found["some"],
        "seed": 9,
        "targets": ["q_proj", "v_proj", "up_proj"],
    }
    oracle.all("make", **some, r=2, lora_alpha=5, lora_dropout=0.1)
    return found


def assert_close(found: dict[Any, Any], wanted: dict[Any, Any], limit: float) -> None:
    """The norm of all differences together is at most `limit` of the norm of what is wanted."""
    assert found.keys() == wanted.keys()
    difference = sum(float(np.square(np.asarray(found[key], np.float64) - wanted[key]).sum()) for key in wanted)
    assert (difference / sum(float(np.square(each).sum()) for each in wanted.values())) ** 0.5 <= limit


def logprobs(ranks: Ranks, adapter: str | None) -> dict[int, Any]:
    """Log-probabilities of completions, by sample."""
    answers = ranks.all("forward", adapter=adapter, rows=ROWS)
    starts = [len(sample.prompt_ids) - 1 for sample in make_samples(0, ROWS)]
    return {row: found["logprobs"][starts[row] :] for answer in answers for row, found in answer.items()}


def state(ranks: Ranks, name: str) -> dict[str, torch.Tensor]:
    return whole(ranks.all("adapter_state", name=name))


@pytest.mark.parametrize(("model", "world", "settings"), LAYOUTS)
def test_log_probabilities_and_gradients_are_those_of_peft_in_float64(
    teams: Teams, oracle: Ranks, made: dict[str, Path], tmp_path: Path, model: str, world: int, settings: dict[str, Any]
) -> None:
    """Also where a mini-batch is split unevenly, and where a rank has no sequence; the model's own weights are not frozen."""
    ranks, path = teams.of(world), teams.models[model]
    ranks.setup(model, **{"betas": (0.0, 0.999), "max_grad_norm": 1e9, "micro_batch_tokens": 40, **settings})
    ranks.all("adapter", name="a", source=made[model], **SHAPE)
    for adapter, directory in (("a", made[model]), ("", None), (None, None)):
        (wanted,) = oracle.all("logprobs", model=path, adapter=directory, rows=ROWS)
        assert_close(logprobs(ranks, adapter), wanted, 1e-6)
    if (
        model == "qwen3-moe"
    ):  # PEFT has a form of its own beside transformers' fused experts, and makes it of such a file
        ranks.all("export_adapter", directory=tmp_path / "a", name="a")
        (wanted,) = oracle.all("logprobs", model=path, adapter=tmp_path / "a", rows=ROWS, fused=True)
        assert_close(logprobs(ranks, "a"), wanted, 1e-6)
    for rows, calls in ((ROWS, [[0], [3, 1, 2, 4], [6, 5]]), (1, [[0]])):
        ranks.all("remove", name="a")
        ranks.all("adapter", name="a", source=made[model], **SHAPE)
        ((loss, wanted),) = oracle.all("gradient", model=path, adapter=made[model], rows=rows)
        answers = ranks.all("adapter_gradient", name="a", rows=rows, calls=calls)
        norm = sum(float(np.square(each).sum()) for each in wanted.values()) ** 0.5
        for total, found, _ in answers:
            assert (total, found) == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-6))
        gradient = whole([slices for *_, slices in answers])
        assert {key.rpartition(".")[2] for key in gradient} == {
            f"{target}|{matrix}" for target in OTHER.get(model, ALL) for matrix in "AB"
        }
        assert_close({key: value.numpy() for key, value in gradient.items()}, wanted, 2e-6)


@pytest.mark.exhaustive
def test_adapters_whose_steps_are_interleaved_end_as_if_each_were_alone_and_nothing_else_changes(
    teams: Teams, oracle: Ranks, tmp_path: Path
) -> None:
    """Bit for bit, here with a mini-batch of the model's own weights; `test_adapters_of_a_role` has more adapters and layouts.

    An adapter that is exported then gives the same log-probabilities in PEFT, and is imported bit for bit.
    """
    model, config = "qwen2", {"rank": 3, "seed": 1, "learning_rate": 0.02}
    own, steps = ([(do, name, number) for do, number in ONE_STEP] for name in ("", "a"))
    ranks = teams.of(2)
    ranks.setup(model, micro_batch_tokens=40, **RECOMPUTED)
    start = gathered(ranks)
    ranks.all("adapter", name="a", **config)
    norms = ranks.all("adapter_steps", order=steps * 2)[0]
    alone = state(ranks, "a")
    assert any(tensor.any() for key, tensor in alone.items() if "|B|weight" in key)
    assert_same(gathered(ranks), start)
    ranks.all("adapter_steps", order=own)
    base = gathered(ranks)

    ranks.setup(model, micro_batch_tokens=40, **RECOMPUTED)
    ranks.all("adapter", name="a", **config)
    assert ranks.all("adapter_steps", order=[own[0], *steps, own[1], *steps])[0] == norms
    assert_same(gathered(ranks), start)
    assert_same(state(ranks, "a"), alone)
    ranks.all("export_adapter", directory=tmp_path / "a", name="a")
    ranks.all_fail("StorageError", "already exists", "export_adapter", directory=tmp_path / "a", name="a")
    (wanted,) = oracle.all("logprobs", model=teams.models[model], adapter=tmp_path / "a", rows=ROWS)
    assert_close(logprobs(ranks, "a"), wanted, 1e-6)
    for row, values in logprobs(ranks, "").items():
        assert np.abs(values - wanted[row]).max() > 0.01, "the adapter matters"
    ranks.all("adapter", name="c", source=tmp_path / "a", **config)
    weights = {key: tensor for key, tensor in alone.items() if key.endswith("weight")}
    assert_same({key: tensor for key, tensor in state(ranks, "c").items() if key.endswith("weight")}, weights)
    ranks.all("adapter_steps", order=own[2:])
    assert_same(gathered(ranks), base)


def test_an_adapter_begins_as_peft_does_with_the_same_values_in_every_layout(teams: Teams, oracle: Ranks) -> None:
    found = []
    for settings in (FSDP2_TP2, SEQUENCES):
        ranks = teams.of(2)
        ranks.setup("qwen3-tied", **settings)
        for name, seed in (("a", 0), ("b", 0), ("c", 1)):
            ranks.all("adapter", name=name, rank=512, targets=("q_proj", "down_proj"), seed=seed)
        found.append({name: state(ranks, name) for name in "abc"})
    for name, tensors in found[1].items():
        assert_same(tensors, found[0][name])
    key = "model.layers.1.self_attn.q_proj|A|weight"
    first, same, other = (tensors[key] for tensors in found[0].values())
    assert torch.equal(first, same), "an adapter's name does not matter"
    assert not torch.equal(first, other), "its seed does"
    assert not any(tensor.any() for name, tensor in found[0]["a"].items() if "|A|weight" not in name)
    (bound,) = oracle.all("first_bound", columns=first.shape[1])
    assert float(first.abs().max()) == pytest.approx(bound, rel=1e-2)


def test_what_is_no_adapter_for_this_model_is_refused_by_the_name_of_the_key_or_tensor(
    teams: Teams, made: dict[str, Path], tmp_path: Path
) -> None:
    source, model = made["some"], "qwen3-tied"
    config = {"rank": 2, "alpha": 5, "targets": ("q_proj", "v_proj", "up_proj")}
    tensors, about = (
        load_file(source / "adapter_model.safetensors"),
        json.loads((source / "adapter_config.json").read_text()),
    )
    prefix = "base_model.model.model.layers."
    q0, up3 = f"{prefix}0.self_attn.q_proj.lora_A.weight", f"{prefix}3.mlp.up_proj.lora_B.weight"
    ranks = teams.of(2)
    ranks.setup(model)

    def refused(says: str, /, changed: dict[str, Any] | None = None, files: Any = None, **options: Any) -> None:
        directory = tmp_path / "broken"
        shutil.copytree(source, directory)
        (directory / "adapter_config.json").write_text(json.dumps({**about, **(changed or {})}))
        if files is not None:
            save_file(files, directory / "adapter_model.safetensors")
        ranks.all_fail("ConfigError", says, "adapter", name="a", source=directory, **{**config, **options})
        shutil.rmtree(directory)

    refused("modules_to_save = ['lm_head']", {"modules_to_save": ["lm_head"]})
    refused("use_dora = True", {"use_dora": True})
    refused("init_lora_weights = 'pissa_niter_4'", {"init_lora_weights": "pissa_niter_4"})
    refused("rank_pattern = {'q_proj': 8}", {"rank_pattern": {"q_proj": 8}})
    refused("peft_type 'IA3'", {"peft_type": "IA3"})
    refused("has rank 2, the configuration 4", rank=4)
    refused("has alpha 5, the configuration 6", alpha=6)
    refused("has targets q_proj, up_proj, v_proj, the configuration q_proj", targets=("q_proj",))
    refused(f"the tensor {q0} in", files={**tensors, q0: torch.zeros(2, 15)})
    refused(f"lacks the tensor {up3}", files={key: tensor for key, tensor in tensors.items() if key != up3})
    missing = q0.replace("layers.0", "layers.4")
    refused(f"holds the tensor {missing}", files={**tensors, missing: tensors[q0].clone()})
    refused(
        "lm_head.base_layer.weight, which is no",
        files={**tensors, "base_model.model.lm_head.base_layer.weight": torch.ones(3)},
    )
    ranks.all_fail("ConfigError", "has no adapter_config.json", "adapter", name="a", source=tmp_path, **config)
    ranks.all_fail("ConfigError", "Did you mean 'q_proj'?", "adapter", name="a", targets=("qproj",))
    ranks.all_fail("ConfigError", "is no name for an adapter", "adapter", name="../a")
    ranks.all_fail("ConfigError", "Known adapters: none", "forward", adapter="a")
    # As PEFT names a layer that something else wraps, too.
    shutil.copytree(source, tmp_path / "wrapped")
    wrapped = {key.replace(".lora_", ".base_layer.lora_"): tensor for key, tensor in tensors.items()}
    save_file(wrapped, tmp_path / "wrapped/adapter_model.safetensors")
    for name, directory in (("plain", source), ("wrapped", tmp_path / "wrapped")):
        ranks.all("adapter", name=name, source=directory, **config)
    assert_same(state(ranks, "wrapped"), state(ranks, "plain"))
    ranks.all_fail("ConfigError", "Known adapters: plain, wrapped", "forward", adapter="a")
    step = [("optim_step", "plain", 0)]
    ranks.all_fail("ProtocolError", "there is no gradient for step 1", "adapter_steps", order=step)
    assert ranks.all("adapter_fails_together", name="plain") == [(["ProtocolError"] * 2, 0)] * 2
    ranks.all_fail("ConfigError", "there is an adapter 'plain' already", "adapter", name="plain")
    assert ranks.all("remove", name="plain") == [("wrapped",)] * 2
    ranks.all_fail("ConfigError", "Known adapters: wrapped", "remove", name="plain")


def test_steps_are_those_of_torch_bit_for_bit_by_the_settings_of_the_adapter_or_of_the_step() -> None:
    """Gradients are clipped by the settings of the adapter; an infinite norm scales nothing."""
    site, alone = LoraSite("model.layers.0.mlp.up_proj", 5, 3, (0, 5), (0, 3)), LoraGroups(None, None, None, True)
    trainer = TrainerConfig(weight_decay=0.1, betas=(0.8, 0.9), max_grad_norm=0.5, lr_warmup_steps=4)
    config = LoraConfig(rank=2, learning_rate=0.3)
    adapter = Adapter("a", config, trainer, [site], None, torch.device("cpu"), alone)
    twins = [parameter.detach().clone().requires_grad_() for parameter in adapter.parameters]
    twin, random_of = torch.optim.AdamW(twins, fused=True), torch.Generator().manual_seed(0)
    for step, size, params in (
        (0, 10.0, None),
        (1, 0.01, None),
        (2, 1e6, AdamParams(0.01, (0.9, 0.95), 1e-6, 0.2, max_grad_norm=math.inf)),
        (3, 1e6, AdamParams(0.0, (0, 0), 0.1, 0.0, max_grad_norm=math.inf)),
        (4, 3.0, None),
    ):
        for mine, other in zip(adapter.parameters, twins, strict=True):
            other.grad = torch.randn(mine.shape, generator=random_of) * size
            mine.grad = other.grad.clone()
        norm = adapter.complete_gradients()
        adapter.change(norm, lambda: None, params)
        settings = params or AdamParams(0.3 * min(1.0, (step + 1) / 4), (0.8, 0.9), 1e-8, 0.1, max_grad_norm=0.5)
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(twins, settings.max_grad_norm)))
        twin.param_groups[0].update(
            lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
        )
        twin.step()
        assert all(torch.equal(mine, other) for mine, other in zip(adapter.parameters, twins, strict=True)), step
    assert adapter.step == 5
    for wrong in ({"learning_rate": math.nan}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"max_grad_norm": 0.0}):
        with pytest.raises(ConfigError, match="AdamW cannot step with"):
            AdamParams(**{"learning_rate": 0.1, **wrong})


def test_the_guides_blocks_are_valid_and_train(teams: Teams) -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/lora.md").read_text()
    settings, alone = (tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", guide, re.DOTALL))
    assert TrainerConfig(**alone["trainer"]).publishes_adapter
    assert RolloutConfig(**alone["rollout"]).adapter_slots == 2
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    ranks = teams.of(2)
    ranks.setup("qwen3-tied", **settings["trainer"])
    before = logprobs(ranks, None)
    assert ranks.all("run_code", code=code)[0]["tokens"] == 3.0
    assert_close(logprobs(ranks, None), before, 0.0)
    assert any((values != before[row]).any() for row, values in logprobs(ranks, "german").items())
