"""`MegatronEngine` in every layout: against `Fsdp2Engine` and transformers' checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import (
    COMPUTED_TOKENS,
    FSDP2_CP2,
    FSDP2_TP2,
    TRAINER,
    Teams,
    assert_same,
    assert_steps_are_those_of_one_rank,
    assert_steps_are_torchs_and_a_saved_run_continues,
    checkpoint,
    exhaustive,
    gathered,
    megatron,
    whole,
)
from safetensors.torch import load_file, save, save_file
from saved_states import saved_tensors

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.engines.registry import training_engine_class

pytestmark = pytest.mark.megatron

VPP = {"pipeline_parallel": 2, "virtual_pipeline": 2}
TP_SP = {"tensor_parallel": 2, "sequence_parallel": True}
PP_DP = {"pipeline_parallel": 2, "distributed_optimizer": True}
EP_DP = {"expert_parallel": 2, "distributed_optimizer": True}
GROUPED = {**EP_DP, "grouped_gemm": True}
OVERLAP = {"overlap_grad_reduce": True, "bucket_parameters": 500}
HALF = {"optimizer": "adamw_bf16"}
GATHER = {**OVERLAP, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("world", "name", "settings"),
    [
        # Every kind of parallelism is in these, and so are both optimizers, tied embeddings or not, and experts.
        pytest.param(2, "deepseek-v3", {**TP_SP, "expert_parallel": 2}, id="latent attention, tp2, ep2"),
        exhaustive(2, "qwen3-tied", VPP, id="pp2, vpp2, tied"),
        exhaustive(4, "qwen2", PP_DP, id="biases, pp2, dp2, distributed optimizer"),
        exhaustive(2, "deepseek-v2", {"pipeline_parallel": 2}, id="latent attention, yarn, pp2"),
        exhaustive(4, "qwen3-moe", EP_DP, id="ep2, dp4, distributed optimizer"),
        exhaustive(4, "qwen3-moe", GROUPED, id="grouped experts, ep2, dp4, distributed optimizer"),
        exhaustive(2, "glm4-moe", {**TP_SP, "expert_parallel": 2}, id="part of a head rotated, tp2, ep2"),
        exhaustive(2, "glm4-moe-lite", {"pipeline_parallel": 2}, id="norms of two kinds, pp2"),
        exhaustive(2, "kimi-k2", {**TP_SP, "expert_parallel": 2}, id="kimi-k2, yarn, tp2, ep2"),
        exhaustive(2, "gpt-oss", {**TP_SP, "expert_parallel": 2}, id="sinks, windows, stacked experts, tp2, ep2"),
        exhaustive(
            4, "gpt-oss", {**PP_DP, "expert_parallel": 2}, id="stacked experts, pp2, ep2, distributed optimizer"
        ),
        exhaustive(
            4, "glm4", {"tensor_parallel": 2, "pipeline_parallel": 2}, id="norms of outputs, fused gate, tp2, pp2"
        ),
        exhaustive(2, "qwen3-next", {**TP_SP, "expert_parallel": 2}, id="linear attention, output gates, tp2, ep2"),
        exhaustive(2, "glm", TP_SP, id="fused gate, neighbours rotated, tp2, sp2"),
    ],
)
def test_steps_are_those_of_fsdp2_and_shards_are_the_checkpoint_before_and_after(
    teams: Teams, tmp_path: Path, world: int, name: str, settings: dict[str, Any]
) -> None:
    assert_steps_are_those_of_one_rank(teams, world, name, tmp_path, **megatron(settings, compute_dtype="float32"))


@pytest.mark.parametrize(
    ("world", "name", "settings"),
    [
        pytest.param(2, "qwen3-untied", VPP, id="vpp2"),
        exhaustive(4, "qwen3-moe", EP_DP, id="ep2, distributed optimizer"),
    ],
)
def test_bfloat16_forward_uses_the_master_weights_rounded(
    teams: Teams, world: int, name: str, settings: dict[str, Any]
) -> None:
    """So what is published in bfloat16 is, bit for bit, what the trainer computes with; masters themselves lose no bit."""
    ranks = teams.of(world)
    ranks.setup(name, **megatron(settings, compute_dtype="bfloat16"))
    assert_same(gathered(ranks), checkpoint(teams.models[name]))
    ranks.all("train", first=0, count=2)
    masters = gathered(ranks)
    used = [[(name, masters[name].shape, *rest) for name, *rest in each] for each in ranks.all("forward_weights")]
    assert_same(whole(used), {name: tensor.bfloat16().float() for name, tensor in masters.items()})


@pytest.mark.parametrize(
    ("world", "name", "layout", "overlap"),
    [
        pytest.param(2, "qwen3-untied", {"distributed_optimizer": True}, GATHER, id="distributed optimizer"),
        exhaustive(2, "qwen3-tied", {}, OVERLAP, id="repeated optimizer"),
        exhaustive(4, "deepseek-v3", {**TP_SP, **EP_DP}, GATHER, id="experts, tp2, ep2, distributed optimizer"),
        exhaustive(4, "qwen2", {**VPP, "distributed_optimizer": True}, GATHER, id="pp2, vpp2"),
    ],
)
def test_overlap_changes_no_bit_of_outputs_gradients_and_weights(
    teams: Teams, world: int, name: str, layout: dict[str, Any], overlap: dict[str, Any]
) -> None:
    """Over two data parallel ranks, whose sums have one order; also where a bucket has no gradient, or a rank no sequence.

    Also after a load that follows a pass which failed while parameters were gathered. A step of several calls adds up their sums,
    and so rounds otherwise.
    """
    ranks, found = teams.of(world), []
    for settings in (layout, {**layout, **overlap}):
        ranks.setup(name, **megatron(settings, max_grad_norm=1e9, betas=(0.0, 0.9)))
        assert all((count > 2) is ("bucket_parameters" in settings) for count in ranks.all("bucket_groups")[:2])
        outputs = []
        steps = [(6, "headless"), (1, "policy"), (6, "policy"), (1, "one-sided"), (6, "headless")]
        for step, (rows, loss) in enumerate(steps):
            ranks.all("train", first=step, count=1, rows=rows, loss=loss)
            outputs += [{row: each["logprobs"].tolist() for row, each in one.items()} for one in ranks.all("forward")]
        weights = gathered(ranks)
        answers = ranks.all("gradient", rows=7, calls=[[0], [3, 1, 2, 4], [6, 5]], loss="policy")
        gradient = whole([[(key, weights[key].shape, *rest) for key, *rest in slices] for _, slices in answers])
        if "pipeline_parallel" not in layout:  # another stage would wait for the pass that fails
            assert set(ranks.all("leave_forward")) == {"the pass ended here."}
            ranks.all("load", directory=str(teams.models[name]))
            outputs += [{row: each["logprobs"].tolist() for row, each in one.items()} for one in ranks.all("forward")]
        found.append((outputs, weights, gradient))
    (outputs, weights, gradient), (mine, changed, summed) = found
    assert mine == outputs
    assert_same(changed, weights)
    apart = sum(float((summed[key] - each).square().sum()) for key, each in gradient.items())
    assert apart <= 1e-6**2 * sum(float(each.square().sum()) for each in gradient.values())


def test_a_layer_that_predicts_further_tokens_is_left_out(teams: Teams, tmp_path: Path) -> None:
    """Both engines skip multi-token prediction layers, as transformers skips DeepSeek-V3's, and read no more than the others."""
    start, ranks = checkpoint(teams.models["deepseek-v3"]), teams.of(2)
    model = shutil.copytree(teams.models["deepseek-v3"], tmp_path / "model")
    further = {
        "model.layers.4.eh_proj.weight": torch.ones(16, 32),
        "model.layers.4.input_layernorm.weight": torch.ones(16),
    }
    save_file(start | further, model / "model.safetensors", {"format": "pt"})
    for layout in (megatron({"pipeline_parallel": 2}), {}):
        ranks.all("setup", model=model, trainer={**TRAINER, **layout})
        assert_same(gathered(ranks), start)


CRITIC = {"head": "value"}
LORA = {"lora": {"rank": 2, "alpha": 4}}
LATENT = {"lora": {**LORA["lora"], "targets": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}}
EXPERTS = [{"expert_parallel": 2}, {}, {**TP_SP, "expert_parallel": 4}, {**VPP, "expert_parallel": 2}]


@pytest.mark.parametrize(
    ("name", "loss", "layouts"),
    [
        ("qwen3-tied", "policy", [{}, megatron(VPP), megatron({"distributed_optimizer": True}), {}]),
        exhaustive("qwen3-moe", "policy", [megatron({"expert_parallel": 2}), {}, megatron({"pipeline_parallel": 2})]),
        exhaustive("deepseek-v3", "policy", [megatron({**TP_SP, "expert_parallel": 2}), {}]),
        exhaustive("qwen3-tied", "policy", [HALF, megatron({"distributed_optimizer": True}, **HALF), HALF]),
        exhaustive("gpt-oss", "policy", [{}, megatron({**TP_SP, "expert_parallel": 2}), megatron(PP_DP), {}]),
        exhaustive("qwen3-next", "policy", [megatron({**TP_SP, "expert_parallel": 2}), {}, megatron({})]),
        exhaustive("glm4", "policy", [megatron({"tensor_parallel": 2}), {}, megatron({"distributed_optimizer": True})]),
        exhaustive("qwen3-critic", "valued", [CRITIC, megatron(TP_SP, **CRITIC), {**FSDP2_TP2, **CRITIC}]),
        exhaustive(
            "qwen2",
            "policy",
            [LORA, *({**layout, **LORA} for layout in (megatron({"tensor_parallel": 2}), FSDP2_TP2, FSDP2_CP2))],
        ),
        exhaustive("deepseek-v3", "policy", [megatron({**TP_SP, "expert_parallel": 2}, **LATENT), LATENT]),
        exhaustive("deepseek-v3", "policy", [LORA, *(megatron(layout, **LORA) for layout in EXPERTS)]),
    ],
)
def test_a_saved_run_goes_on_in_another_engine_and_layout_with_the_same_weights_and_moments(
    teams: Teams, tmp_path: Path, name: str, loss: str, layouts: list[dict[str, Any]]
) -> None:
    """The adapter of ``trainer.lora`` included, also where it is beside experts."""
    ranks = teams.of(4 if layouts[-1].get("megatron", {}).get("expert_parallel") else 2)
    ranks.setup(name, **layouts[0])
    ranks.all("train", first=0, count=2, loss=loss)
    ranks.all("save", directory=tmp_path / "0")
    published, wanted = gathered(ranks), saved_tensors(tmp_path / "0")
    reports = ranks.all("train", first=2, count=2, loss=loss)[0]
    for number, settings in enumerate(layouts[1:]):
        ranks.setup(name, **settings)
        assert ranks.all("load", directory=tmp_path / str(number)) == [2] * len(ranks)
        assert_published(gathered(ranks), published, settings)
        ranks.all("save", directory=tmp_path / str(number + 1))
        assert_same(saved_tensors(tmp_path / str(number + 1)), wanted)
        for mine, theirs in zip(ranks.all("train", first=2, count=2, loss=loss)[0], reports, strict=True):
            both = (mine.keys() | theirs.keys()) - COMPUTED_TOKENS
            assert {key: mine[key] for key in both} == pytest.approx(
                {key: theirs[key] for key in both}, rel=1e-4, abs=1e-4
            )
    if name == "qwen3-next":
        ranks.all_fail("ConfigError", "no adapters for a model with linear attention", "adapter", name="a")
    if any(".mlp.experts." in key and "|A|" in key for key in wanted):
        about = teams.models[name], tmp_path / "exported", torch.float32
        training_engine_class("fsdp2").export_saved(tmp_path / "0", *about)
        assert_published(checkpoint(tmp_path / "exported"), published, LORA)
        adapters = tmp_path / "0/adapters.safetensors"
        beyond = {"default|model.layers.9.up_proj|A|weight": torch.zeros(2, 2)}
        adapters.write_bytes(save({**load_file(adapters), **beyond}))
        says = "is also beside model.layers.9"
        ranks.all_fail("ConfigError", says, "load", directory=tmp_path / "0")
        with pytest.raises(ConfigError, match=says):
            training_engine_class("fsdp2").export_saved(tmp_path / "0", *about)


def assert_published(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    """The same bits; but for rounding with an adapter, since some CPUs round a product of slices in another way."""
    if "lora" not in settings:
        assert_same(found, wanted)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-6, atol=1e-7)


def test_engines_of_one_layout_share_their_ranks_whichever_ends_first_and_another_layout_is_refused(
    teams: Teams,
) -> None:
    """Models of several roles, in turns; each is trained to the bits that it gets alone."""
    ranks, layout = teams.of(2), megatron({"tensor_parallel": 2})
    alone = []
    for name in ("qwen3-tied", "llama-untied"):
        ranks.setup(name, **layout)
        alone.append([ranks.all("train", first=step, count=1) for step in range(3)])
    first, second = alone
    ranks.setup("qwen3-tied", **layout)
    assert ranks.all("train", first=0, count=1) == first[0]
    ranks.all("swap")
    ranks.setup("llama-untied", **layout)
    for step, engine in ((0, second), (1, first), (1, second)):
        if engine is first:
            ranks.all("swap")
        assert ranks.all("train", first=step, count=1) == engine[step]
        if engine is first:
            ranks.all("swap")
    ranks.all("swap")
    ranks.all("close")  # the engine that made the groups
    other = {"model": teams.models["qwen3-tied"], "trainer": {**TRAINER, **megatron({"pipeline_parallel": 2})}}
    ranks.all_fail("ConfigError", "in another layout: tensor_parallel is 1, not 2, pipeline_parallel", "setup", **other)
    ranks.all("close")
    ranks.all("swap")
    assert ranks.all("train", first=2, count=1) == second[2]
    ranks.all("close")
    ranks.all("setup", **other)
    assert len(ranks.all("train", first=0, count=1)) == 2, "nothing is left of the other layout"


def test_equal_sequences_are_computed_once(teams: Teams) -> None:
    """Nothing follows what they share."""
    ranks = teams.of(2)
    ranks.setup("qwen3-tied", **megatron({"tensor_parallel": 2}))
    (found, _) = ranks.all("forward_equal")
    assert len(found) == 3
    for each in found:
        torch.testing.assert_close(torch.from_numpy(each), torch.from_numpy(found[-1]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        pytest.param("adamw_bf16", {"distributed_optimizer": True}, id="adamw_bf16, distributed optimizer"),
        exhaustive("adamw_bf16", {"expert_parallel": 2}, id="adamw_bf16, ep2"),
        exhaustive("adamw_8bit", {"distributed_optimizer": True}, id="adamw_8bit, distributed optimizer"),
        exhaustive("adamw_8bit", {**TP_SP, "expert_parallel": 2}, id="adamw_8bit, sp2, ep2"),
    ],
)
def test_moments_in_fewer_bits_are_rounded_after_each_step_only_and_a_saved_run_continues(
    teams: Teams, tmp_path: Path, optimizer: str, settings: dict[str, Any]
) -> None:
    made = megatron(settings, optimizer=optimizer, max_grad_norm=1e9)  # the oracle reads gradients that are not clipped
    assert_steps_are_torchs_and_a_saved_run_continues(teams, "qwen3-moe", tmp_path, **made)
