"""Episodes over vLLM: the calculator example by a tool and by a program, and the tokens of agents, one by one."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from episodes_over_vllm import play_over_vllm
from run_process import StartRun, events_of
from tiny_run import IN_ENGINE
from waiting import HANG_S

from weightlane.trainer.data.tasks import Task
from weightlane.trainer.data.tokenizer import HfTokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.exhaustive]

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the example's preparation makes."""
    folder = tmp_path_factory.mktemp("calculator") / "task"
    prepare = [sys.executable, str(EXAMPLE / "prepare.py"), "--out", str(folder)]
    subprocess.run(prepare, check=True, timeout=10 * HANG_S, stdout=subprocess.DEVNULL)
    return folder


@pytest.mark.parametrize("played_by", ["calculator", "agent"])
def test_the_calculator_example_takes_two_turns_and_trains_the_engines_own_tokens(
    played_by: str, task: Path, tmp_path: Path, start_run: StartRun
) -> None:
    run_dir = tmp_path / "run"
    settings = {
        "run.dir": run_dir,
        "model.path": task / "model",
        "data.train": task / "train.jsonl",
        "data.heldout": task / "heldout.jsonl",
        "loop.steps": 4,
        "loop.evaluate_tasks": 16,
        "loop.samples_per_step": 64,
        "loop.max_staleness": 0,
        "loop.blocking_syncs": 0,
        "rollout.extra_engine_args.distributed_executor_backend": IN_ENGINE,
    }
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    ended = start_run(["train", str(EXAMPLE / f"{played_by}.toml"), "--plain", *arguments]).end()
    assert (ended.code, ended.err) == (0, ""), ended.out + ended.err
    steps = events_of(run_dir, "training_step")
    # The trainer computes the log-probabilities of the tokens that it was given: those of other tokens would differ.
    assert max(step["approx_kl"] for step in steps) < 1e-6
    assert all(1.5 < step["turns"] <= 4 for step in steps)
    assert all(0.2 < step["prefix_reuse"] < 1 for step in steps)
    assert played_by == "agent" or all(step["environment/tool_calls"] > 0.5 for step in steps)
    assert all(step["sequences"] == 1 for step in steps)
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert any("<|tool|>" in sample["completion"] and sample["turns"] == 2 for sample in samples if sample["reward"])


TALKS = """
from openai import AsyncOpenAI

async def talk(task, client):
    messages = []
    async with AsyncOpenAI(**client) as openai:
        for word in task["prompt"].split():
            messages.append({"role": "user", "content": word})
            made = await openai.chat.completions.create(model="", messages=messages)
            messages.append(made.choices[0].message)
        await openai.chat.completions.create(model="", messages=messages[2:3])
    return len(word)
"""


def test_an_agents_trained_tokens_are_those_that_vllm_read_and_wrote_one_by_one(tmp_path: Path) -> None:
    make = runpy.run_path(str(EXAMPLE / "prepare.py"))
    made = make["make_tokenizer"]()
    model_dir = tmp_path / "model"
    torch.manual_seed(0)
    make["ARITHMETIC"]["make_model"](made, 256).save_pretrained(model_dir)
    made.save_pretrained(model_dir)
    (tmp_path / "talks.py").write_text(TALKS)
    options = {"function": "talks:talk", "reward": "agent"}
    found = play_over_vllm(model_dir, options, tmp_path, Task("One two three.", ""), max_model_len=256)
    assert [episode.reward for episode in found.episodes] == [6.0] * 4
    assert len(found.sequences) == 8
    tokenizer = HfTokenizer(model_dir)
    texts = [tokenizer.encode(tokenizer.decode(wrote)) for _, wrote in found.said]
    assert texts != [wrote for _, wrote in found.said], "these tokens could not be had from their text"
