"""Episodes that an environment plays over a real vLLM engine in this process, and the tokens that are trained of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from running_replica import probed_replica, started
from transformers import AutoModelForCausalLM
from waiting import HANG_S

from weightlane.rollout import LocalReplica
from weightlane.trainer.config import EnvironmentConfig
from weightlane.trainer.data.sequences import IGNORED, TokenSequence
from weightlane.trainer.data.tasks import Task
from weightlane.trainer.data.tokenizer import HfTokenizer
from weightlane.trainer.loop.environments import EnvironmentContext
from weightlane.trainer.loop.environments.player import Player
from weightlane.trainer.loop.environments.registry import make_environment
from weightlane.trainer.loop.prompt_group import PromptGroup, to_batch
from weightlane.trainer.loop.protocols import Played
from weightlane.trainer.objectives.config import AlgorithmConfig


@dataclass
class OverVllm:
    """Episodes of one task at the same time."""

    episodes: list[Played] = field(default_factory=list)
    said: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """What vLLM read before each reply, and the reply, as vLLM itself gives them."""
    sequences: Sequence[TokenSequence] = ()
    """What a step would train on."""


def play_over_vllm(
    model_dir: Path, options: Mapping[str, Any], search_path: Path, task: Task, *, max_model_len: int, count: int = 4
) -> OverVllm:
    """Have an agent play `count` episodes of `task`, and check that what is trained is what vLLM read and wrote, one by one."""
    found = OverVllm()
    config = EnvironmentConfig(name="agent", options=options)
    algorithm = AlgorithmConfig(max_new_tokens=12, group_size=count, compute_zero_advantage=True)
    tokenizer = HfTokenizer(model_dir)

    async def play(replica: LocalReplica) -> list[Played]:
        engine = replica._engine.running
        generate = engine.generate

        async def recorded(*arguments: Any, **given: Any) -> AsyncIterator[Any]:
            read: list[int] = []
            wrote: list[int] = []
            async for output in generate(*arguments, **given):
                read = list(output.prompt_token_ids)
                wrote += output.outputs[0].token_ids  # those since the output before
                yield output
            found.said.append((read, wrote))

        engine.generate = recorded
        environment = make_environment(config, EnvironmentContext([search_path], model_dir))
        assert environment is not None
        player = Player(
            environment,
            config,
            algorithm,
            tokenizer=tokenizer,
            stop_token_ids=[tokenizer.encode("<|endoftext|>")[0]],
            judge=no_judge,
            max_model_len=max_model_len,
        )
        async with asyncio.timeout(HANG_S):
            episodes = await asyncio.gather(*(player.play(replica, task, greedy=False) for _ in range(count)))
        await environment.close()
        return episodes

    replica = probed_replica("rollout-0", model_dir, in_engine=True, max_model_len=max_model_len, dtype="float32")
    with started(replica) as runner:
        found.episodes = runner.run(play(replica))
    assert not [episode.error for episode in found.episodes if episode.error]
    batch, _ = to_batch([PromptGroup(task, found.episodes, "rollout-0")], algorithm)
    found.sequences = batch.sequences
    trained = [part for sequence in batch.sequences for part in parts_of(sequence)]
    assert sorted(trained) == sorted(found.said), "what vLLM read before each reply, and the reply"
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    for sequence in batch.sequences:
        places = sequence.targets != IGNORED
        logits = model(sequence.tokens[None]).logits[0].log_softmax(-1)[places]
        expected = logits.gather(1, sequence.targets[places][:, None])[:, 0]
        logprobs = sequence.per_token["rollout_logprobs"][places].double()
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    return found


async def no_judge(completion: str, task: Mapping[str, Any]) -> float:
    raise AssertionError(completion)


def parts_of(sequence: TokenSequence) -> list[tuple[list[int], list[int]]]:
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
