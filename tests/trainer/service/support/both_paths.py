"""The arithmetic example over the SDK, and `weightlane train` with the example's configuration, on the same samples."""

from __future__ import annotations

import random
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from float64_reference import VOCAB
from local_dispatch import in_dispatch
from tiny_models import load_tensors
from waiting import HANG_S

from weightlane.rollout.contract.records import Completion
from weightlane.trainer import AlgorithmConfig, Objective, RoleSpec, TrainerConfig, WorkerDispatch
from weightlane.trainer.algorithms.roles import OBJECTIVE, POLICY
from weightlane.trainer.data.tasks import Task
from weightlane.trainer.loop.prompt_group import PromptGroup, to_batch
from weightlane.trainer.loop.protocols import Played, Trajectory, Turn
from weightlane.trainer.runner.jobs import Export
from weightlane.trainer.runner.runner import Runner

EXAMPLES = Path(__file__).parents[4] / "examples"
RUN = tomllib.loads((EXAMPLES / "arithmetic/arithmetic.toml").read_text())
TRAINER = TrainerConfig.model_validate({**RUN["trainer"], "ranks": 1, "device": "cpu"})
ANSWERS, TOKENS = "aab-", 4
"""The answer to each task, of which no completion is the last; and tokens of a completion, 128 in a step: 1/128 is exact."""


def steps_of_the_example(training: Any, prompt: list[int], far: float, *loss: Any) -> list[list[PromptGroup]]:
    """Take two steps by the example's functions on drawn samples, whose log-probabilities are off by up to `far`.

    Returns the samples.
    """
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "tinker/arithmetic.py")))
    tokenizer = SimpleNamespace(encode=lambda _: prompt, decode=lambda tokens, **_: "ab"[tokens[0] % 2])
    draws = random.Random(0)
    steps: list[list[PromptGroup]] = []

    def sample(_: Any, count: int, params: Any) -> Any:
        answer, drawn = ANSWERS[len(steps[-1])], [[draws.randrange(VOCAB) for _ in range(TOKENS)] for _ in range(count)]
        scored = training.forward([example.datum(prompt, each) for each in drawn], "cross_entropy").result(HANG_S)
        near = [found["logprobs"].tolist()[-TOKENS:] for found in scored.loss_fn_outputs]
        completions = [
            Completion("", tokens, [each + draws.uniform(-far, far) for each in logprobs], [0] * TOKENS, "stop")
            for tokens, logprobs in zip(drawn, near, strict=True)
        ]
        rewards = [float(tokenizer.decode(each.token_ids) == answer) for each in completions]
        episodes = [
            Played(Trajectory((Turn(prompt, each),)), reward=reward)
            for each, reward in zip(completions, rewards, strict=True)
        ]
        steps[-1].append(PromptGroup(Task("", answer), episodes, ""))
        sequences = [SimpleNamespace(tokens=each.token_ids, logprobs=each.logprobs) for each in completions]
        return SimpleNamespace(result=lambda: SimpleNamespace(sequences=sequences))

    sampler = SimpleNamespace(result=lambda: SimpleNamespace(sample=sample))
    client = SimpleNamespace(save_weights_and_get_sampling_client=lambda **_: sampler)
    for step in range(2):
        steps.append([])
        rollouts, _ = example.rollouts(client, tokenizer, [{"prompt": "", "answer": each} for each in ANSWERS], step)
        training.forward_backward(rollouts, *loss)
        training.optim_step(example.adam(TRAINER.learning_rate, step)).result(HANG_S)
    return steps


def weights_of_train(model: Path, steps: list[list[PromptGroup]], objective: str, out: Path) -> dict[str, torch.Tensor]:
    """The weights after a run's steps on the same samples."""
    algorithm = AlgorithmConfig.model_validate({**RUN["algorithm"], "objective": objective})

    async def use(dispatch: WorkerDispatch) -> None:
        runner = Runner(dispatch)
        for groups in steps:
            await runner.train_step(*to_batch(groups, algorithm))
        await runner.run(Export(out, "float32"))

    in_dispatch([RoleSpec(POLICY, TRAINER, model, {OBJECTIVE: Objective(algorithm)})], use)
    return load_tensors(out)
