"""Every training engine passes the same tests in each of its layouts, in real processes over gloo."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import (
    FSDP2_TP2,
    VOCAB,
    Ranks,
    Teams,
    assert_fence_tells_of_changes,
    assert_same,
    checkpoint,
    gathered,
    megatron,
)
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from waiting import NEVER_S

from weightlane.trainer.engines.registry import training_engine_class

# Here every engine splits a model in each of the ways it can; what layouts compute is in test_fsdp2*.py and test_megatron.py.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2-2": (2, {}),
    "fsdp2-tp2": (2, FSDP2_TP2),
    "megatron-dp2-distributed": (2, megatron({"distributed_optimizer": True})),
    "megatron-tp2-pp2": (4, megatron({"tensor_parallel": 2, "pipeline_parallel": 2})),
}
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2-1": (1, {}),
    "fsdp2-2-tp2": (4, FSDP2_TP2),
    "megatron-1": (1, megatron({})),
    "megatron-tp2": (2, megatron({"tensor_parallel": 2})),
}
ALL_LAYOUTS = LAYOUTS | MORE_LAYOUTS

Setup = Callable[..., Ranks]


def layout_params(*names: str) -> list[Any]:
    """Names of layouts, marked by what they need."""
    return [
        pytest.param(
            name,
            marks=[pytest.mark.megatron] * name.startswith("megatron")
            + [pytest.mark.exhaustive] * (name in MORE_LAYOUTS),
        )
        for name in names
    ]


@pytest.fixture(params=layout_params(*ALL_LAYOUTS))
def setup(request: pytest.FixtureRequest, teams: Teams) -> Setup:
    """Lets ranks in one of the layouts load a model by name, and gives them."""
    world, settings = ALL_LAYOUTS[request.param]

    def loaded(model: str, **trainer: Any) -> Ranks:
        ranks = teams.of(world)
        ranks.setup(model, **settings, **trainer)
        return ranks

    return loaded


def test_shards_are_the_checkpoint_bit_for_bit_each_is_fenced_and_an_export_of_trained_ones_loads_in_transformers(
    setup: Setup, models: dict[str, Path], tmp_path: Path
) -> None:
    """Names as on disk: tied tensors once, fused ones one by one."""
    start, out = models["qwen3-tied"], tmp_path / "exported"
    ranks = setup("qwen3-tied", compute_dtype="bfloat16")
    assert_same(gathered(ranks, "bfloat16"), checkpoint(start))
    assert_fence_tells_of_changes(ranks, checkpoint(start))
    ranks.all("export", directory=out)
    trained = gathered(ranks)
    assert_same(checkpoint(out), trained)
    assert any(not torch.equal(trained[key], value) for key, value in checkpoint(start).items())
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert type(loaded) is type(AutoModelForCausalLM.from_pretrained(start))
    assert loaded.dtype == torch.float32
    assert len(PreTrainedTokenizerFast.from_pretrained(out)) == VOCAB
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize("setup", layout_params("fsdp2-2", "megatron-dp2-distributed"), indirect=True)
def test_what_transformers_keeps_in_float32_travels_and_is_written_like_that(
    request: pytest.FixtureRequest, setup: Setup, models: dict[str, Path], tmp_path: Path
) -> None:
    start, half = models["deepseek-v3"], tmp_path / "bfloat16"
    AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16).save_pretrained(half)
    wanted = checkpoint(half)
    assert {tensor.dtype for tensor in wanted.values()} == {torch.float32, torch.bfloat16}
    ranks = setup("deepseek-v3", compute_dtype="bfloat16")
    sent = {name: dtype for slices in ranks.all("shards", wire_dtype="bfloat16") for name, _, dtype, *_ in slices}
    assert sent == {name: str(tensor.dtype) for name, tensor in wanted.items()}
    ranks.all("export", directory=tmp_path / "exported", dtype="bfloat16")
    ranks.all("save", directory=tmp_path / "state")
    engine = training_engine_class(request.node.callspec.params["setup"].partition("-")[0])
    engine.export_saved(tmp_path / "state", start, tmp_path / "from state", torch.bfloat16)
    for written in ("exported", "from state"):
        assert_same(checkpoint(tmp_path / written), wanted)
        assert all(tensor.dtype == wanted[name].dtype for name, tensor in checkpoint(tmp_path / written).items())


@pytest.mark.megatron
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_megatron_engine_that_is_closed_takes_its_process_groups_with_it(teams: Teams) -> None:
    """It has dozens, whose threads poll; the worker closes an engine when the next one is set up."""
    ranks, threads = teams.of(2), []
    for _ in range(3):
        ranks.setup("qwen3-tied", **megatron({"tensor_parallel": 2}))
        ranks.all("train", first=0, count=1)
        threads.append(ranks.all("gloo_threads"))
    of_one_group = 3
    new = [after - before for before, after in zip(threads[1], threads[2], strict=True)]
    assert max(new) <= of_one_group, "all but one of seventeen groups have ended"


def test_bfloat16_compute_keeps_float32_master_weights_and_stays_close(setup: Setup) -> None:
    reports = {}
    for dtype in ("float32", "bfloat16"):
        ranks = setup("qwen3-untied", compute_dtype=dtype)
        reports[dtype] = ranks.all("train", first=0, count=2, loss="sft")[0]
    exact, rounded = ([report["loss"] for report in reports[dtype]] for dtype in ("float32", "bfloat16"))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.03)
    master = gathered(ranks, "bfloat16")["lm_head.weight"]
    assert not torch.equal(master, master.bfloat16().float())


def test_a_saved_run_continues_bit_for_bit_and_can_be_exported_and_storage_never_moves(
    request: pytest.FixtureRequest, setup: Setup, models: dict[str, Path], tmp_path: Path
) -> None:
    ranks = setup("qwen3-tied", lr_warmup_steps=5)
    addresses = ranks.all("addresses")
    ranks.all("train", first=0, count=2)
    assert ranks.all("save", directory=tmp_path / "state") == [2] * len(ranks)
    saved = gathered(ranks)
    drawn = ranks.all("draw")
    expected_reports = ranks.all("train", first=2, count=2)
    expected = gathered(ranks)
    name = request.node.callspec.params["setup"].partition("-")[0]
    engine, out = training_engine_class(name), tmp_path / "exported"
    engine.export_saved(tmp_path / "state", models["qwen3-tied"], out, torch.bfloat16)  # in this process, without ranks
    assert_same(checkpoint(out), {name: tensor.bfloat16() for name, tensor in saved.items()})
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    # Back in the same engine, then in a fresh one.
    assert ranks.all("load", directory=tmp_path / "state") == [2] * len(ranks)
    assert ranks.all("train", first=2, count=2) == expected_reports
    assert_same(gathered(ranks), expected)
    assert ranks.all("addresses") == addresses
    setup("qwen3-tied", lr_warmup_steps=5)
    ranks.all("draw")
    ranks.all("load", directory=tmp_path / "state")
    assert ranks.all("draw") == drawn
    assert ranks.all("train", first=2, count=2) == expected_reports
    assert_same(gathered(ranks), expected)


def test_a_step_whose_fence_fails_at_once_or_whose_gradient_is_not_finite_changes_nothing_on_any_rank(
    setup: Setup, models: dict[str, Path]
) -> None:
    ranks = setup("qwen3-untied")
    for report in ranks.all("fence", fail_at=0):
        assert (report["changed"], report["error"], report["step"]) == ([], "the fence failed.", 0)
    for report in ranks.all("fence", overflow=True):
        assert (report["changed"], report["calls"], report["step"]) == ([], [], 0)
        assert "gradient norm" in report["error"]
    assert_fence_tells_of_changes(ranks, checkpoint(models["qwen3-untied"]))


def test_samples_without_a_gradient_can_be_left_out_and_the_step_is_the_same(setup: Setup) -> None:
    weights, reports = [], []
    for zeros in ("computed", "left out"):
        ranks = setup("qwen3-untied")
        (report,) = ranks.all("train", first=0, count=1, zeros=zeros)[0]
        reports.append(report)
        weights.append(gathered(ranks))
    computed, left_out = reports
    assert computed["tokens"] > left_out["tokens"] > 0
    assert [left_out[key] for key in ("loss", "norm")] == pytest.approx([computed[key] for key in ("loss", "norm")])
    assert left_out["entropy"] == pytest.approx(computed["entropy"], rel=0.5), "a mean over what was computed"
    for key, value in weights[0].items():
        assert torch.allclose(weights[1][key], value, rtol=0, atol=1e-6)


def test_a_directory_that_is_there_or_a_disk_that_is_full_fails_on_every_rank_and_leaves_nothing_behind(
    setup: Setup, tmp_path: Path
) -> None:
    """A limit on file sizes stands in for the disk: the same calls fail in the same way."""
    taken, new = tmp_path / "taken", tmp_path / "new"
    taken.mkdir()
    ranks = setup("qwen3-tied")
    for do in ("save", "export"):
        ranks.all_fail("StorageError", "already exists", do, directory=taken)
        ranks.all("limit_files", size=2000)
        ranks.all_fail("StorageError", "could not be written", do, directory=new)
        ranks.all("limit_files", size=None)
    assert [*tmp_path.iterdir(), *taken.iterdir()] == [taken]
    ranks.all("train", first=0, count=1)
    assert ranks.all("save", directory=new) == [1] * len(ranks)


@pytest.mark.parametrize("layout", layout_params("fsdp2-2", "megatron-dp2-distributed"))
def test_a_dead_rank_is_reported_by_the_others_without_waiting_for_the_timeout(teams: Teams, layout: str) -> None:
    with teams.new(2, timeout_s=NEVER_S) as ranks:
        ranks.setup("qwen3-tied", **LAYOUTS[layout][1])
        ranks.kill(1)
        ranks.tell(0, "train", first=0, count=1)
        answer = ranks.answer(0)
        assert answer.get("error") in {"PeerLostError", "TransportError"}, answer
        ranks.tell(0, "close")
        assert ranks.answer(0) == {"ok": None}


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
