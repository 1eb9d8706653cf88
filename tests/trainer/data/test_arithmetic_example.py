"""The arithmetic demo's material, and the programs that train on it."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from weightlane.trainer.config import DataConfig
from weightlane.trainer.data.rewards import Reward
from weightlane.trainer.data.tasks import load_splits
from weightlane.trainer.engines.hf.model_dir import check_model_dir

EXAMPLE = Path(__file__).parents[3] / "examples" / "arithmetic"
SETTINGS = ("--seed", "3", "--steps", "1")


def run(program: str, *arguments: str) -> None:
    """Run a program of the example in this process, with one thread, as many small operations are faster so."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [program, *arguments])
            runpy.run_path(str(EXAMPLE / program), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared material, which has taken the place of material of other settings."""
    out = tmp_path_factory.mktemp("arithmetic") / "task"
    out.mkdir()
    (out / "prepared.json").write_text('{"seed": 4}')
    (out / "train.jsonl").write_text("of other settings")
    run("prepare.py", "--out", str(out), *SETTINGS)
    return out


def test_prepared_material_is_whole_and_a_second_call_does_nothing(
    task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json.loads((task / "prepared.json").read_text())["seed"] == 3
    info, tokenizer = check_model_dir(task / "model"), AutoTokenizer.from_pretrained(task / "model")
    assert info.config["eos_token_id"] == tokenizer.eos_token_id
    train, heldout = load_splits(DataConfig(train=task / "train.jsonl", heldout=task / "heldout.jsonl"), str)
    assert (len(train), len(heldout[""])) == (9500, 500)
    reward = Reward("reward:exact_match", [EXAMPLE])
    for each in [*train[:50], *heldout[""][:50]]:
        left, right = each.prompt.removesuffix("=").split("+")
        assert int(each.answer[::-1]) == int(left) + int(right)
        assert tokenizer.decode(tokenizer.encode(each.prompt)) == each.prompt
        assert reward(each.answer, each.as_mapping()) == 1.0
        assert reward(each.answer + "0", each.as_mapping()) == 0.0
    run("prepare.py", "--out", str(task), *SETTINGS)
    assert "already prepared" in capsys.readouterr().out


def test_the_programs_for_right_answers_and_for_preferences_train(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").symlink_to(task / "model")
    (tmp_path / "train.jsonl").symlink_to(task / "train.jsonl")
    heldout = (task / "heldout.jsonl").read_text().splitlines()
    (tmp_path / "heldout.jsonl").write_text("\n".join(heldout[:10]))
    for how, steps, share in (("sft", 5, 0.9), ("dpo", 3, 1.0)):
        run("finetune.py", how, str(tmp_path), "--steps", str(steps))
        said = capsys.readouterr().out
        first, last = (float(loss) for loss in re.findall(r"loss ([0-9.]+)", said))
        assert last < share * first, said
        assert re.search(r"held-out accuracy \d\.\d+ -> \d\.\d+", said)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(SystemExit) as caught:
        run("prepare.py", "--out", str(tmp_path), "--steps", "1")
    assert caught.value.code == 2
    assert (tmp_path / "thesis.txt").read_text() == "precious"
