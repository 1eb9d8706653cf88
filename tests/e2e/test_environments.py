"""Episodes over vLLM: the calculator example by a tool and by a program, and the tokens of agents, one by one."""

from __future__ import annotations

import asyncio
import json
import runpy
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from run_process import StartRun, events_of
from running_replica import probed_replica, started
from tiny_run import IN_ENGINE
from transformers import AutoModelForCausalLM
from waiting import HANG_S

from weightlane.rollout import LocalReplica
from weightlane.trainer.config import EnvironmentConfig
from weightlane.trainer.data.sequences import IGNORED
from weightlane.trainer.data.tasks import Task
from weightlane.trainer.data.tokenizer import HfTokenizer
from weightlane.trainer.loop.environments import EnvironmentContext
from weightlane.trainer.loop.environments.player import Player
from weightlane.trainer.loop.environments.registry import make_environment
from weightlane.trainer.loop.prompt_group import PromptGroup, to_batch
from weightlane.trainer.loop.protocols import Played
from weightlane.trainer.objectives.config import AlgorithmConfig

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


def test_an_agents_trained_tokens_are_those_that_vllm_read_and_wrote_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = runpy.run_path(str(EXAMPLE / "prepare.py"))
    made = make["make_tokenizer"]()
    model_dir = tmp_path / "model"
    torch.manual_seed(0)
    make["ARITHMETIC"]["make_model"](made, 256).save_pretrained(model_dir)
    made.save_pretrained(model_dir)
    (tmp_path / "talks.py").write_text(TALKS)
    algorithm = AlgorithmConfig(max_new_tokens=12, group_size=4, compute_zero_advantage=True)
    context = EnvironmentContext([tmp_path], model_dir)
    config = EnvironmentConfig(name="agent", options={"function": "talks:talk", "reward": "agent"})
    task = Task("One two three.", "")
    said: list[tuple[list[int], list[int]]] = []
    tokenizer = HfTokenizer(model_dir)

    async def play(replica: LocalReplica) -> list[Played]:
        engine = replica._engine.running
        generate = engine.generate

        async def recorded(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
            """Keep the tokens that vLLM itself read and wrote."""
            read: list[int] = []
            wrote: list[int] = []
            async for output in generate(*arguments, **options):
                read = list(output.prompt_token_ids)
                wrote += output.outputs[0].token_ids  # those since the output before
                yield output
            said.append((read, wrote))

        monkeypatch.setattr(engine, "generate", recorded)
        environment = make_environment(config, context)
        assert environment is not None
        player = Player(
            environment,
            config,
            algorithm,
            tokenizer=tokenizer,
            stop_token_ids=[made.eos_token_id],
            judge=no_judge,
            max_model_len=256,
        )
        async with asyncio.timeout(HANG_S):
            episodes = await asyncio.gather(*(player.play(replica, task, greedy=False) for _ in range(4)))
        await environment.close()
        return episodes

    replica = probed_replica("rollout-0", model_dir, in_engine=True, max_model_len=256, dtype="float32")
    with started(replica) as runner:
        episodes = runner.run(play(replica))
    assert [(episode.error, episode.reward) for episode in episodes] == [(None, 6.0)] * 4
    batch, _ = to_batch([PromptGroup(task, episodes, "rollout-0")], algorithm)
    trained = [part for sequence in batch.sequences for part in parts_of(sequence)]
    assert len(batch) == 8
    assert sorted(trained) == sorted(said), "what vLLM read before each reply, and the reply"
    texts = [tokenizer.encode(tokenizer.decode(wrote)) for _, wrote in said]
    assert texts != [wrote for _, wrote in said], "these tokens could not be had from their text"
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    for sequence in batch.sequences:
        places = sequence.targets != IGNORED
        logits = model(sequence.tokens[None]).logits[0].log_softmax(-1)[places]
        expected = logits.gather(1, sequence.targets[places][:, None])[:, 0]
        found = sequence.per_token["rollout_logprobs"][places].double()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


async def no_judge(completion: str, task: Mapping[str, Any]) -> float:
    raise AssertionError(completion)


def parts_of(sequence: Any) -> list[tuple[list[int], list[int]]]:
    """The runs of targets of a sequence, each with all tokens before it."""
    tokens = [*sequence.tokens.tolist(), int(sequence.targets[-1])]
    parts: list[tuple[list[int], list[int]]] = []
    for place, target in enumerate(sequence.targets.tolist()):
        if target == IGNORED:
            continue
        if not parts or len(parts[-1][0]) + len(parts[-1][1]) != place + 1:
            parts.append((tokens[: place + 1], []))
        parts[-1][1].append(target)
    return parts
