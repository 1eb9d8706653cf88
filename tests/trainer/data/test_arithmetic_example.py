"""The arithmetic demo's material."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from weightlane.trainer.config import DataConfig
from weightlane.trainer.data.rewards import Reward
from weightlane.trainer.data.tasks import load_splits
from weightlane.trainer.engines.hf.model_dir import check_model_dir

EXAMPLE = Path(__file__).parents[3] / "examples" / "arithmetic"


def prepare(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare.py", *arguments])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    runpy.run_path(str(EXAMPLE / "prepare.py"), run_name="__main__")


def test_prepared_material_is_whole_and_a_second_call_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "task"
    prepare(monkeypatch, "--out", str(out), "--seed", "3", "--steps", "1")
    info = check_model_dir(out / "model")
    assert info.architecture == "Qwen3ForCausalLM"
    assert info.config["head_dim"] == 32  # the smallest that vLLM's CPU attention takes
    train, heldout = load_splits(DataConfig(train=out / "train.jsonl", heldout=out / "heldout.jsonl"), str)
    assert (len(train), len(heldout)) == (9500, 500)
    reward = Reward("reward:exact_match", [EXAMPLE])
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    for task in [*train[:50], *heldout[:50]]:
        left, right = task.prompt.removesuffix("=").split("+")
        assert int(task.answer[::-1]) == int(left) + int(right)
        ids = tokenizer.encode(task.prompt)
        assert len(ids) == 6
        assert tokenizer.decode(ids) == task.prompt
        assert reward(task.answer, task.as_mapping()) == 1.0
        assert reward(task.answer + "0", task.as_mapping()) == 0.0
    assert AutoModelForCausalLM.from_pretrained(out / "model").config.eos_token_id == tokenizer.eos_token_id
    stamp = (out / "model" / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    prepare(monkeypatch, "--out", str(out), "--seed", "3", "--steps", "1")
    assert "already prepared" in capsys.readouterr().out
    assert (out / "model" / "model.safetensors").stat().st_mtime_ns == stamp
    prepare(monkeypatch, "--out", str(out), "--seed", "4", "--steps", "1")
    assert json.loads((out / "prepared.json").read_text())["seed"] == 4
    assert load_splits(DataConfig(train=out / "train.jsonl", heldout=out / "heldout.jsonl"), str)[1] != heldout


def test_the_programs_for_right_answers_and_for_preferences_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(monkeypatch, "--out", str(tmp_path / "task"), "--seed", "3", "--steps", "10")
    for how in ("sft", "dpo"):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["finetune.py", how, str(tmp_path / "task"), "--steps", "21"])
        runpy.run_path(str(EXAMPLE / "finetune.py"), run_name="__main__")
        said = capsys.readouterr().out
        losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", said)]
        assert losses[1] < 0.9 * losses[0], said
        assert re.search(r"held-out accuracy 0\.\d+ -> 0\.\d+", said)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(SystemExit) as caught:
        prepare(monkeypatch, "--out", str(tmp_path), "--steps", "1")
    assert caught.value.code == 2
    assert (tmp_path / "thesis.txt").read_text() == "precious"
