"""With ``trainer.lora``, an engine exports and saves merged weights, and publishes these or the adapter alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft_oracle
import pytest
import torch
from engine_ranks import (
    FSDP2_TP2,
    TRAINER,
    Ranks,
    Teams,
    assert_fence_tells_of_changes,
    assert_same,
    case,
    checkpoint,
    exhaustive,
    gathered,
    megatron,
    whole,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from weightlane.trainer.engines.registry import training_engine_class

MODEL = "qwen3-tied"
TARGETS = ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj")
LORA = {"rank": 3, "alpha": 4, "targets": TARGETS, "learning_rate": 0.02}
ALONE = {**LORA, "publish": "adapter"}
EXPERTS = {"expert_parallel": 2, "distributed_optimizer": True}
LAYOUTS = [
    exhaustive({}, id="fsdp2-2"),
    exhaustive({"model": "qwen3-moe"}, id="fsdp2-2, experts"),
    case(megatron({"tensor_parallel": 2, "sequence_parallel": True}), id="megatron-sp2"),
    exhaustive(
        megatron({"pipeline_parallel": 2}, compute_dtype="bfloat16", activation_checkpointing=True), id="megatron-pp2"
    ),
    exhaustive({**megatron(EXPERTS), "model": "qwen3-moe"}, id="megatron-ep2, experts, distributed optimizer"),
]
"""Settings of two ranks, and their model, if it is not `MODEL`."""
Setup = Callable[..., Ranks]


@pytest.fixture(params=LAYOUTS)
def setup(request: pytest.FixtureRequest, teams: Teams) -> Setup:
    """Lets ranks in one of the layouts load the model with an adapter, unless other settings say otherwise."""

    def loaded(**trainer: Any) -> Ranks:
        ranks = teams.of(2)
        ranks.setup(**{"model": MODEL, "lora": LORA, **request.param, **trainer})
        return ranks

    return loaded


def changing(start: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in start if name.removesuffix(".weight").rpartition(".")[2] in TARGETS]


def state(ranks: Ranks) -> dict[str, torch.Tensor]:
    return whole(ranks.all("adapter_state", name="default"))


@pytest.mark.skipif(not peft_oracle.PEFT.is_dir(), reason="PEFT is not installed (see .ci/setup-env)")
@pytest.mark.parametrize("setup", [case({}, id="fsdp2-2"), *LAYOUTS[1:]], indirect=True)
def test_shards_and_exports_are_what_peft_merges_and_the_model_itself_has_neither_gradients_nor_moments(
    request: pytest.FixtureRequest, setup: Setup, models: dict[str, Path], oracle: Ranks, tmp_path: Path
) -> None:
    settings = request.node.callspec.params["setup"]
    ranks, base = setup(), models[settings.get("model", MODEL)]
    start = checkpoint(base)
    assert_same(gathered(ranks), start)
    assert ranks.all("base_has_state") == [(False, 0)] * len(ranks)
    ranks.all("train", first=0, count=2)
    ranks.all("export_adapter", directory=tmp_path / "adapter", name="default")
    (merged,) = oracle.all("merged", model=base, adapter=tmp_path / "adapter")
    trained = gathered(ranks)
    assert trained.keys() == start.keys()
    for name, tensor in trained.items():
        wanted = torch.from_numpy(merged[name])
        assert float((tensor.double() - wanted).norm() / wanted.norm()) <= 1e-6
        assert torch.equal(tensor, start[name]) is (name not in changing(start))
    ranks.all("export", directory=tmp_path / "exported")
    assert_same(checkpoint(tmp_path / "exported"), trained)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").dtype == torch.float32
    ranks.all("save", directory=tmp_path / "state")
    engine = training_engine_class(settings.get("engine", "fsdp2"))
    engine.export_saved(tmp_path / "state", base, tmp_path / "from state", torch.bfloat16)
    for name, tensor in checkpoint(tmp_path / "from state").items():
        assert tensor.dtype == torch.bfloat16
        assert torch.allclose(tensor.float(), trained[name].bfloat16().float(), rtol=0.01, atol=1e-6)
        assert name in changing(start) or torch.equal(tensor, start[name].bfloat16())

    # A run that publishes the adapter alone exports the same bit for bit, and continues the state of the other.
    setup(lora=ALONE)
    ranks.all("train", first=0, count=2)
    ranks.all("export", directory=tmp_path / "exported alone")
    assert_same(checkpoint(tmp_path / "exported alone"), trained)
    published = gathered(ranks)
    assert_same(published, load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    setup(lora=ALONE)
    assert ranks.all("load", directory=tmp_path / "state") == [2, 2]
    assert_same(gathered(ranks), published)
    for report in ranks.all("fence"):
        assert [name for call in report["calls"] for name in call["named"]] == list(published)
        assert report["calls"][0]["changed"] == []
        assert set(report["changed"]) == set(report["published"]) != set()


@pytest.mark.parametrize(
    ("settings", "saved_bytes"),
    [
        case({}, 2, id="fsdp2"),
        exhaustive({**FSDP2_TP2, "compute_dtype": "bfloat16"}, 2, id="fsdp2-tp2"),
        exhaustive(megatron({"pipeline_parallel": 2}, compute_dtype="bfloat16"), 4, id="megatron-pp2"),
    ],
)
def test_a_base_in_half_precision_stays_so_and_trains_and_publishes_the_bits_that_its_float32_copy_does(
    teams: Teams, tmp_path: Path, settings: dict[str, Any], saved_bytes: int
) -> None:
    """A state of the copy, as older versions wrote it, is loaded; one with values that would be rounded is not."""
    ranks, found, held = teams.of(2), {}, {}
    rounded = {name: tensor.bfloat16() for name, tensor in checkpoint(teams.models["qwen3-untied"]).items()}
    for dtype in (torch.float32, torch.bfloat16):
        base = tmp_path / str(dtype)
        shutil.copytree(teams.models["qwen3-untied"], base)
        save_file(
            {name: each.to(dtype) for name, each in rounded.items()}, base / "model.safetensors", {"format": "pt"}
        )
        ranks.all("setup", model=base, trainer={**TRAINER, "lora": LORA, **settings})
        held[dtype] = sum(ranks.all("parameter_bytes"))
        ranks.all("train", first=0, count=2)
        ranks.all("export", directory=tmp_path / f"{dtype} exported")
        sent = gathered(ranks, "bfloat16")
        grown = sum(ranks.all("parameter_bytes")) - held[dtype]
        assert grown == 2 * sum(sent[name].numel() for name in changing(sent)), "merged as they are sent"
        found[dtype] = gathered(ranks), state(ranks), checkpoint(tmp_path / f"{dtype} exported")
        assert_same(*({name: each.bfloat16() for name, each in some.items()} for some in (sent, found[dtype][0])))
        ranks.all("save", directory=tmp_path / f"{dtype} state")
    for full, half in zip(found[torch.float32], found[torch.bfloat16], strict=True):
        assert_same(half, full)
    assert held[torch.float32] - held[torch.bfloat16] >= saved_bytes * sum(each.numel() for each in rounded.values())
    assert ranks.all("load", directory=tmp_path / "torch.float32 state") == [2, 2]
    assert_same(gathered(ranks), found[torch.float32][0])
    ranks.setup("qwen3-untied", lora=LORA, **settings)
    ranks.all("save", directory=tmp_path / "finer")
    ranks.all("setup", model=base, trainer={**TRAINER, "lora": LORA, **settings})
    ranks.all_fail("StorageError", "bfloat16 would round", "load", directory=tmp_path / "finer")


def test_the_fence_names_exactly_what_changes_and_a_step_that_fails_before_changes_nothing(
    request: pytest.FixtureRequest, setup: Setup, models: dict[str, Path]
) -> None:
    start = checkpoint(models[request.node.callspec.params["setup"].get("model", MODEL)])
    ranks = setup()
    before = state(ranks)
    for report in ranks.all("fence", fail_at=0):
        assert (report["changed"], report["error"], report["step"]) == ([], "WeightlaneError: the fence failed.", 0)
    for report in ranks.all("fence", overflow=True):
        assert (report["changed"], report["calls"], report["step"]) == ([], [], 0)
        assert "gradient norm" in report["error"]
    assert_same(state(ranks), before)
    assert_fence_tells_of_changes(ranks, changing(start))


def test_a_saved_run_continues_bit_for_bit_with_all_its_adapters_and_storage_never_moves(
    setup: Setup, tmp_path: Path
) -> None:
    """Also where everything is moved to the host and back in the middle of a mini-batch."""
    ranks = setup(lr_warmup_steps=5)
    other: dict[str, Any] = {"name": "other", "rank": 2, "targets": ("gate_proj",)}
    ranks.all("adapter", **other)
    addresses = ranks.all("addresses")
    ranks.all("train", first=0, count=2)
    ranks.all("adapter_steps", order=[("forward_backward", "other", 0), ("optim_step", "other", 0)])
    assert ranks.all("save", directory=tmp_path / "state") == [2] * len(ranks)

    def go_on(*, moves: bool = False) -> tuple[Any, ...]:
        norms = []
        for name in ("default", "other"):
            for do in ("forward_backward", "forward_backward", "optim_step"):
                norms.append(ranks.all("adapter_steps", order=[(do, name, 2)]))
                if moves:
                    ranks.all("adapter_offload", state=tmp_path / "state")
        return norms, gathered(ranks), state(ranks), whole(ranks.all("adapter_state", name="other"))

    expected = go_on()
    for again in ("the same engine", "a fresh one"):
        if again == "a fresh one":
            setup(lr_warmup_steps=5)
            ranks.all_fail("ConfigError", "the state has an adapter 'other'", "load", directory=tmp_path / "state")
            assert ranks.all("adapter", **other) == [("default", "other")] * len(ranks)
        assert ranks.all("load", directory=tmp_path / "state", optimizer=False) == [0] * len(ranks)
        assert not any(moment.any() for key, moment in state(ranks).items() if "exp_avg" in key)
        assert ranks.all("load", directory=tmp_path / "state") == [2] * len(ranks)
        found = go_on(moves=again == "a fresh one")
        assert found[0] == expected[0]
        for mine, theirs in zip(found[1:], expected[1:], strict=True):
            assert_same(mine, theirs)
        assert again == "a fresh one" or ranks.all("addresses") == addresses


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "world", "settings", "share"),
    [
        case(MODEL, 2, megatron({"distributed_optimizer": True}), 0.5, id="dp2"),
        case("deepseek-v3", 4, megatron(EXPERTS), 0.5, id="experts, dp4, ep2"),
    ],
)
def test_divided_moments_give_the_bits_of_whole_ones_and_a_state_goes_on_with_either(
    teams: Teams, tmp_path: Path, model: str, world: int, settings: dict[str, Any], share: float
) -> None:
    ranks, lora = teams.of(world), {"rank": 3, "learning_rate": 0.02}
    whole_moments = megatron({**settings["megatron"], "distributed_optimizer": False})
    found = []
    for layout, other in ((whole_moments, settings), (settings, whole_moments)):
        ranks.setup(model, lora=lora, **layout)
        held = sum(ranks.all("moment_bytes"))
        steps = [ranks.all("train", first=0, count=2)]
        directory = tmp_path / str(len(found))
        ranks.all("save", directory=directory)
        steps.append(ranks.all("train", first=2, count=1))
        found.append((steps, held, gathered(ranks), state(ranks), load_file(directory / "adapters.safetensors")))
        ranks.setup(model, lora=lora, **other)
        assert ranks.all("load", directory=directory) == [2] * world
        assert ranks.all("train", first=2, count=1) == steps[1]
        assert_same(state(ranks), found[-1][3])
    (steps, held, *tensors), (divided_steps, divided, *divided_tensors) = found
    assert divided_steps == steps
    assert 0 < divided <= 1.1 * share * held
    for mine, theirs in zip(divided_tensors, tensors, strict=True):
        assert_same(mine, theirs)


def test_a_state_loads_in_another_layout_with_moments_and_is_refused_where_adapters_differ(
    teams: Teams, tmp_path: Path
) -> None:
    ranks = teams.of(2)
    ranks.setup(MODEL, lora=LORA)
    ranks.all("train", first=0, count=2)
    ranks.all("save", directory=tmp_path / "state")
    saved, published = state(ranks), gathered(ranks)
    ranks.setup(MODEL, lora=LORA, **FSDP2_TP2)
    assert ranks.all("load", directory=tmp_path / "state") == [2] * 2
    assert_same(state(ranks), saved)
    for name, tensor in gathered(ranks).items():
        assert torch.allclose(tensor, published[name], rtol=1e-6, atol=1e-7)
    ranks.setup(MODEL)
    ranks.all("save", directory=tmp_path / "without")
    says = "the state has an adapter 'default', the engine none"
    ranks.all_fail("ConfigError", says, "load", directory=tmp_path / "state")
    ranks.all("adapter", name="default", **LORA)
    ranks.all_fail("ConfigError", "was saved with trainer.lora", "load", directory=tmp_path / "state")
    ranks.setup(MODEL, lora=LORA)
    says = "the engine has an adapter 'default', the state none"
    ranks.all_fail("ConfigError", says, "load", directory=tmp_path / "without")
    ranks.all_fail("ConfigError", "holds no saved training state", "load", directory=tmp_path / "nowhere")
    ranks.setup(MODEL, lora={**LORA, "alpha": 5})
    ranks.all_fail("ConfigError", "its adapter 'default' has", "load", directory=tmp_path / "state")
    ranks.all_fail("ConfigError", "weights are frozen", "adapter_steps", order=[("forward_backward", "", 0)])
    ranks.all_fail("ConfigError", "cannot be removed", "remove", name="default")
    (tmp_path / "state" / "adapters.json").unlink()
    ranks.all_fail("ConfigError", "it has only adapters.safetensors", "load", directory=tmp_path / "state")
