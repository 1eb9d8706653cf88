"""A whole run trains on an unmodified environment of verifiers, over vLLM, with the tokens that the engine read and wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent_world import task_of
from episodes_over_vllm import play_over_vllm
from run_process import StartRun, events_of

EXAMPLE = Path(__file__).parents[1] / "example"


def test_hangmans_held_out_reward_rises(hangman: Path, tmp_path: Path, start_run: StartRun) -> None:
    run_dir = tmp_path / "run"
    settings = {
        "run.dir": run_dir,
        "model.path": hangman / "model",
        "data.train": hangman / "train.jsonl",
        "data.heldout": hangman / "heldout.jsonl",
    }
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    ended = start_run(["train", str(EXAMPLE / "hangman.toml"), "--plain", *arguments]).end()
    assert ended.code == 0, ended.out + ended.err  # NLTK and verifiers print what they like
    steps = events_of(run_dir, "training_step")
    # The trainer computes the log-probabilities of the tokens that it was given: those of other tokens would differ.
    assert steps[0]["approx_kl"] < 1e-6
    assert all(1 < step["turns"] <= 16 and step["sequences"] == 1 for step in steps)
    assert all(step["environment/game_reward"] == pytest.approx(step["reward"]) for step in steps)
    assert not (run_dir / "failures.jsonl").exists()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.06


def test_the_trained_tokens_are_those_that_vllm_read_and_wrote_one_by_one(hangman: Path, tmp_path: Path) -> None:
    line = (hangman / "train.jsonl").read_text().splitlines()[0]
    options = {"function": "weightlane_verifiers:play", "reward": "agent"}
    found = play_over_vllm(hangman / "model", options, tmp_path, task_of(line), max_model_len=320)
    assert len(found.sequences) == len(found.episodes) == 4
    assert sum(len(episode.trajectory.turns) for episode in found.episodes) == len(found.said) > 8
    assert all(0 <= episode.reward <= 1 for episode in found.episodes)
