"""``weightlane sft`` finds a user's mistake before it starts anything, says where it is, and leaves nothing behind."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from tiny_run import Material, toml_of

from weightlane.cli.config.any_config import load_any_config
from weightlane.cli.config.sft_config import load_sft_config
from weightlane.cli.config.validation import explain
from weightlane.trainer.data.sft_examples import load_examples
from weightlane.trainer.data.tokenizer import HfTokenizer

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs/guides/supervised-fine-tuning.md"

EXAMPLES = [{"prompt": f"{left}+1=", "completion": str(left + 1)} for left in range(8)]


class Trial:
    """A run that must fail before it starts."""

    def __init__(self, material: Material, folder: Path) -> None:
        self.folder = folder
        self.sections: dict[str, dict[str, Any]] = {
            "run": {"dir": str(folder / "run")},
            "model": {"path": str(material.model)},
            "data": {"train": str(self.examples("train.jsonl", EXAMPLES[:6]))},
            "sft": {"batch_size": 4},
        }

    def examples(self, name: str, lines: list[dict[str, Any]]) -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def config(self) -> Path:
        path = self.folder / "sft.toml"
        path.write_text(toml_of(self.sections))
        return path

    def fails(self, said: str, *arguments: str) -> None:
        for command in (["sft", "--plain"], ["check"]):
            ended = run(*command, str(self.config()), *arguments, columns=1000)
            assert (ended.exit_code, ended.stdout) == (2, ""), ended.stderr
            assert said in ended.stderr
        assert not (self.folder / "run").exists()


@pytest.fixture
def trial(material: Material, tmp_path: Path, nothing_starts: None) -> Trial:
    return Trial(material, tmp_path)


def test_a_missing_state_and_mistakes_in_the_data_are_named_by_file_and_line(trial: Trial) -> None:
    trial.fails("holds no saved state to resume from. Leave --resume out", "--resume")
    trial.examples("train.jsonl", [*EXAMPLES[:2], {"prompt": "1+1="}])
    trial.fails("train.jsonl, line 3: 'completion' must be a non-empty string")
    trial.examples("train.jsonl", [{"messages": [{"role": "user", "content": "1+1"}]}])
    trial.fails("train.jsonl, line 1: no message has the role 'assistant'")
    trial.examples("train.jsonl", [EXAMPLES[0], {"prompt": "1" * 70, "completion": "1"}])
    trial.fails("train.jsonl, line 2: 72 tokens, and at most 64 are allowed")  # by the model
    trial.examples("train.jsonl", EXAMPLES[:6])
    trial.sections["data"]["heldout"] = str(trial.examples("heldout.jsonl", EXAMPLES[4:]))
    trial.fails("heldout.jsonl, line 1: the same example is in")
    trial.fails("Check data.heldout.", "--set", "data.heldout=nowhere.jsonl")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("sft.epoch=2", "there is no key sft.epoch. Did you mean sft.epochs? [sft] has the keys epochs, steps"),
        ("trainer.frozen=true", "there is no key trainer.frozen."),
        ("model.path=nowhere/at/all", "there is no model directory"),
        ("trainer.lora.targets=['embed_tokens']", "no linear layer 'embed_tokens' in its decoder layers"),
    ],
)
def test_mistakes_in_the_settings_are_named_by_their_key(trial: Trial, setting: str, said: str) -> None:
    trial.fails(said, "--set", setting)


def test_what_a_run_takes_is_counted_without_starting_it(trial: Trial) -> None:
    ended = run("check", str(trial.config()), "--set", "sft.epochs=3")
    assert ended.exit_code == 0, ended.stderr
    assert "6 of " in ended.stdout
    assert "5 optimizer steps of 4 examples" in ended.stdout  # 18 examples
    assert not (trial.folder / "run").exists()


def test_the_blocks_of_the_guide_are_accepted(trial: Trial, material: Material) -> None:
    blocks = {name: re.findall(rf"```{name}\n(.*?)```", GUIDE.read_text(), re.DOTALL) for name in ("json", "toml")}
    with_adapter = blocks["toml"][0].replace("# [trainer.lora]", "[trainer.lora]").replace("# rank", "rank")
    for text, rank in ((blocks["toml"][0], None), (with_adapter, 16)):
        (trial.folder / "guide.toml").write_text(text)
        config = load_sft_config(trial.folder / "guide.toml")
        assert (config.trainer.lora and config.trainer.lora.rank) == rank
    lines = [json.loads(block) for block in blocks["json"]]
    assert [sorted(line) for line in lines] == [["completion", "prompt"], ["messages"]]
    tokenizer = HfTokenizer(material.model)
    path = trial.examples("lines.jsonl", lines[:1])
    assert len(load_examples(path, tokenizer, [0], max_tokens=20).all) == 1


def test_the_printed_configuration_reads_back_the_same_and_is_told_from_that_of_a_run_with_rollouts(
    trial: Trial, material: Material
) -> None:
    trial.sections["trainer"] = {"ranks": 2}
    config = load_sft_config(trial.config(), ["sft.steps=7", "trainer.lora.rank=4"])
    again = trial.folder / "printed.toml"
    again.write_text(explain(config))
    assert load_any_config(again) == config
    printed = run("config", str(trial.config()), "--set", "sft.steps=7", "--set", "trainer.lora.rank=4")
    assert tomllib.loads(printed.stdout) == tomllib.loads(again.read_text())
    other = load_any_config(material.write_config(trial.folder / "other", trial.folder / "run"))
    assert type(other).__name__ == "RunConfig"
