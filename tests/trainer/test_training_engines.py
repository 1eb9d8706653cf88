"""What every training engine promises, in real processes over gloo: the same tests for each engine and layout."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import TRAINER, VOCAB, Ranks, assert_same, checkpoint, gathered
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Layout:
    """An engine and how it splits a model over `world` ranks."""

    world: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class Team:
    """Worker processes that train in one layout."""

    ranks: Ranks
    settings: dict[str, Any]

    def setup(self, model: Path, **trainer: Any) -> None:
        self.ranks.all("setup", model=str(model), trainer={**TRAINER, **self.settings, **trainer})


def megatron(**settings: Any) -> dict[str, Any]:
    return {"engine": "megatron", "megatron": settings}


TEAMS = {
    "fsdp2-1": Layout(1, {}),
    "fsdp2-2": Layout(2, {}),
    "fsdp2-tp2": Layout(2, {"fsdp2": {"tensor_parallel": 2}}),
    "fsdp2-2-tp2": Layout(4, {"fsdp2": {"tensor_parallel": 2}}),
    "megatron-1": Layout(1, megatron()),
    "megatron-tp2": Layout(2, megatron(tensor_parallel=2)),
    "megatron-dp2-distributed": Layout(2, megatron(distributed_optimizer=True)),
    "megatron-tp2-pp2": Layout(4, megatron(tensor_parallel=2, pipeline_parallel=2)),
}


def engine_params(*names: str) -> list[Any]:
    """Names of `TEAMS`, marked by what they need."""
    return [pytest.param(name, marks=[pytest.mark.megatron] * name.startswith("megatron")) for name in names]


@pytest.fixture(params=engine_params(*TEAMS))
def team(request: pytest.FixtureRequest, ranks_of: Callable[[int], Ranks]) -> Team:
    layout = TEAMS[request.param]
    return Team(ranks_of(layout.world), layout.settings)


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-untied", "llama-untied"])
def test_shards_of_all_ranks_are_the_checkpoint_bit_for_bit(
    team: Team, models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Names as on disk: tied tensors once, fused ones one by one."""
    team.setup(models[name])
    assert_same(gathered(team.ranks, tmp_path / "shards", "bfloat16"), checkpoint(models[name]))


@pytest.mark.megatron
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_megatron_engine_that_is_closed_takes_its_process_groups_with_it(
    ranks_of: Callable[[int], Ranks], models: dict[str, Path]
) -> None:
    """It has dozens, whose threads poll; the worker closes an engine when the next one is set up."""
    layout, threads = TEAMS["megatron-tp2"], []
    team = Team(ranks_of(layout.world), layout.settings)
    for _ in range(3):
        team.setup(models["qwen3-tied"])
        team.ranks.all("train", first=0, count=1)
        threads.append(team.ranks.all("gloo_threads"))
    of_one_group = 3
    new = [after - before for before, after in zip(threads[1], threads[2], strict=True)]
    assert max(new) <= of_one_group, "all but one of seventeen groups have ended"


def test_export_loads_in_transformers_with_the_trained_weights(
    team: Team, models: dict[str, Path], tmp_path: Path
) -> None:
    name = "qwen3-tied"
    team.setup(models[name], compute_dtype="bfloat16")
    team.ranks.all("train", first=0, count=1)
    out = tmp_path / "exported"
    team.ranks.all("export", directory=str(out))
    trained = gathered(team.ranks, tmp_path / "shards")
    assert_same(checkpoint(out), trained)
    assert any(not torch.equal(trained[key], value) for key, value in checkpoint(models[name]).items())
    loaded = AutoModelForCausalLM.from_pretrained(out)
    start = AutoModelForCausalLM.from_pretrained(models[name])
    assert type(loaded) is type(start)
    assert loaded.dtype == torch.float32
    assert len(PreTrainedTokenizerFast.from_pretrained(out)) == VOCAB
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_bfloat16_compute_keeps_float32_master_weights_and_stays_close(
    team: Team, models: dict[str, Path], tmp_path: Path
) -> None:
    reports = {}
    for dtype in ("float32", "bfloat16"):
        team.setup(models["qwen3-untied"], compute_dtype=dtype)
        reports[dtype] = team.ranks.all("train", first=0, count=2, loss="sft")[0]
    exact, rounded = ([report["loss"] for report in reports[dtype]] for dtype in ("float32", "bfloat16"))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.03)
    master = gathered(team.ranks, tmp_path / "shards", "bfloat16")["lm_head.weight"]
    assert not torch.equal(master, master.bfloat16().float())


def test_a_saved_run_continues_bit_for_bit_and_storage_never_moves(
    team: Team, models: dict[str, Path], tmp_path: Path
) -> None:
    team.setup(models["qwen3-tied"], lr_warmup_steps=5)
    addresses = team.ranks.all("shards", file=str(tmp_path / "first"))
    team.ranks.all("train", first=0, count=2)
    assert team.ranks.all("save", directory=str(tmp_path / "state")) == [2] * len(team.ranks.processes)
    drawn = team.ranks.all("draw")
    expected_reports = team.ranks.all("train", first=2, count=2)
    expected = gathered(team.ranks, tmp_path / "expected")
    # Back in the same engine, then in a fresh one.
    assert team.ranks.all("load", directory=str(tmp_path / "state")) == [2] * len(team.ranks.processes)
    assert team.ranks.all("train", first=2, count=2) == expected_reports
    assert_same(gathered(team.ranks, tmp_path / "again"), expected)
    assert team.ranks.all("shards", file=str(tmp_path / "last")) == addresses
    team.setup(models["qwen3-tied"], lr_warmup_steps=5)
    team.ranks.all("draw")
    team.ranks.all("load", directory=str(tmp_path / "state"))
    assert team.ranks.all("draw") == drawn
    assert team.ranks.all("train", first=2, count=2) == expected_reports
    assert_same(gathered(team.ranks, tmp_path / "fresh"), expected)


def test_the_fence_names_every_checkpoint_tensor_once_and_before_it_changes(
    team: Team, models: dict[str, Path]
) -> None:
    team.setup(models["qwen3-tied"])
    reports = team.ranks.all("fence")
    order = [[call["named"] for call in report["calls"]] for report in reports]
    assert all(parts == order[0] for parts in order)
    named = [tensor for part in order[0] for tensor in part]
    assert sorted(named) == sorted(checkpoint(models["qwen3-tied"]))
    for report in reports:
        assert report["published"] == [tensor for tensor in named if tensor in set(report["published"])]
        assert report["changed"] == report["published"]
        may_change: set[str] = set()
        for call in report["calls"]:
            assert set(call["changed_before"]) == may_change & set(report["published"])
            may_change |= set(call["named"])
        assert (report["error"], report["step"]) == ("", 1)


def test_nothing_changes_when_the_fence_fails_at_once(team: Team, models: dict[str, Path]) -> None:
    team.setup(models["qwen3-untied"])
    for report in team.ranks.all("fence", fail_at=0):
        assert report["changed"] == []
        assert (report["error"], report["step"]) == ("the fence failed.", 0)
    team.ranks.all("train", first=0, count=1)


def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(team: Team, models: dict[str, Path]) -> None:
    team.setup(models["qwen3-untied"])
    for report in team.ranks.all("overflow"):
        assert "gradient norm" in report["error"]
        assert not report["fence_called"]
        assert report["unchanged"]


def test_a_state_directory_is_never_overwritten_and_every_rank_says_so(
    team: Team, models: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    team.setup(models["qwen3-tied"])
    for do in ("save", "export"):
        for rank in range(len(team.ranks.processes)):
            team.ranks.tell(rank, do, directory=str(tmp_path / "taken"))
        for rank in range(len(team.ranks.processes)):
            answer = team.ranks.answer(rank)
            assert answer["error"] == "StorageError"
            assert "already exists" in answer["message"]
    assert list((tmp_path / "taken").iterdir()) == []


def test_a_disk_that_is_full_leaves_nothing_behind_and_the_engine_usable(
    team: Team, models: dict[str, Path], tmp_path: Path
) -> None:
    """A limit on file sizes stands in for the disk: the same calls fail in the same way."""
    team.setup(models["qwen3-tied"])
    team.ranks.all("limit_files", size=2000)
    for do in ("save", "export"):
        for rank in range(len(team.ranks.processes)):
            team.ranks.tell(rank, do, directory=str(tmp_path / do))
        for rank in range(len(team.ranks.processes)):
            answer = team.ranks.answer(rank)
            assert answer.get("error") == "StorageError", answer
            assert "could not be written" in answer["message"]
    assert list(tmp_path.iterdir()) == []
    team.ranks.all("limit_files", size=None)
    team.ranks.all("train", first=0, count=1)
    assert team.ranks.all("save", directory=str(tmp_path / "save")) == [1] * len(team.ranks.processes)


@pytest.mark.parametrize("engine", engine_params("fsdp2-2", "megatron-tp2"))
def test_a_dead_rank_is_reported_by_the_others_in_time(models: dict[str, Path], engine: str) -> None:
    with Ranks(2) as ranks:
        Team(ranks, TEAMS[engine].settings).setup(models["qwen3-tied"])
        ranks.processes[1].kill()
        ranks.processes[1].wait(10)
        began = time.monotonic()
        ranks.tell(0, "train", first=0, count=1)
        answer = ranks.answer(0)
        assert answer["error"] in {"PeerLostError", "TransportError"}, answer
        assert time.monotonic() - began < 30.0  # half the timeout: the loss itself was noticed
        ranks.tell(0, "close")
        assert ranks.answer(0) == {"ok": None}


@pytest.mark.parametrize("engine", engine_params("fsdp2-1", "megatron-1"))
def test_weights_that_do_not_fit_their_config_are_refused(
    ranks_of: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path, engine: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models["qwen3-tied"], broken)
    config = json.loads((broken / "config.json").read_text())
    layers = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    (broken / "config.json").write_text(json.dumps({**config, **layers}))
    ranks = ranks_of(1)
    ranks.tell(0, "setup", model=str(broken), trainer={**TRAINER, **TEAMS[engine].settings})
    answer = ranks.answer(0)
    assert answer["error"] == "ConfigError"
    assert "missing keys model.layers.4." in answer["message"]
