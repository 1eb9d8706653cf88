"""The arithmetic example over the SDK; and its steps as jobs, for the runner of `weightlane train` and `sft` and for a worker."""

from __future__ import annotations

import asyncio
import random
import runpy
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from float64_reference import VOCAB
from local_dispatch import in_dispatch
from safetensors.torch import load_file
from tiny_models import load_tensors
from waiting import HANG_S

from weightlane.rollout.contract.records import Completion
from weightlane.trainer import (
    AlgorithmConfig,
    Objective,
    RoleSpec,
    TokenBatch,
    TokenSequence,
    TrainerConfig,
    WorkerDispatch,
)
from weightlane.trainer.algorithms.roles import OBJECTIVE, POLICY
from weightlane.trainer.data.tasks import Task
from weightlane.trainer.loop.prompt_group import PromptGroup, to_batch
from weightlane.trainer.loop.protocols import Played, Trajectory, Turn
from weightlane.trainer.runner.job_queue.job_queue import JobQueue
from weightlane.trainer.runner.job_worker import JobWorker
from weightlane.trainer.runner.jobs import Export, Job, RlStep, Save, SftStep
from weightlane.trainer.runner.runner import Runner

EXAMPLES = Path(__file__).parents[4] / "examples"
RUN = tomllib.loads((EXAMPLES / "arithmetic/arithmetic.toml").read_text())
TRAINER = TrainerConfig.model_validate({**RUN["trainer"], "ranks": 1, "device": "cpu"})
ANSWERS, TOKENS, EOS = "aab-", 4, 2
"""The answer to each task, of which no completion is the last; and tokens of a completion, 128 in a step: 1/128 is exact."""


def example() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / "tinker/arithmetic.py")))


def supervised_steps(training: Any, prompt: list[int]) -> list[Job[Any]]:
    """Take two supervised steps by the example's functions; returns them as jobs."""
    source, draws, jobs = example(), random.Random(1), list[Job[Any]]()
    for step in range(2):
        rows = [[draws.randrange(VOCAB) for _ in range(TOKENS)] for _ in ANSWERS]
        tokens = iter(rows)
        tokenizer = SimpleNamespace(
            encode=lambda text, tokens=tokens: prompt if text else next(tokens)[:-1], eos_token_id=EOS
        )
        data = [source.supervised(tokenizer, {"prompt": "a", "answer": ""}, len(rows)) for _ in rows]
        training.forward_backward(data, "cross_entropy")
        training.optim_step(source.adam(TRAINER.learning_rate, step)).result(HANG_S)
        batch = tuple(TokenSequence.of_completion(prompt, [*row[:-1], EOS]) for row in rows)
        jobs.append(SftStep(TokenBatch(batch)))
    return jobs


def reinforced_steps(
    training: Any, prompt: list[int], far: float, algorithm: AlgorithmConfig, *loss: Any
) -> list[Job[Any]]:
    """Take two steps of RL by the example's functions on drawn samples, whose log-probabilities are off by up to `far`.

    Returns them as jobs.
    """
    source = example()
    tokenizer = SimpleNamespace(encode=lambda _: prompt, decode=lambda tokens, **_: "ab"[tokens[0] % 2])
    draws = random.Random(0)
    steps: list[list[PromptGroup]] = []

    def sample(_: Any, count: int, params: Any) -> Any:
        answer, drawn = ANSWERS[len(steps[-1])], [[draws.randrange(VOCAB) for _ in range(TOKENS)] for _ in range(count)]
        scored = training.forward([source.datum(prompt, each) for each in drawn], "cross_entropy").result(HANG_S)
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
        rollouts, _ = source.rollouts(client, tokenizer, [{"prompt": "", "answer": each} for each in ANSWERS], step)
        training.forward_backward(rollouts, *loss)
        training.optim_step(source.adam(TRAINER.learning_rate, step)).result(HANG_S)
    return [RlStep(*to_batch(groups, algorithm)) for groups in steps]


def algorithm_of(objective: str) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({**RUN["algorithm"], "objective": objective})


def trained_by_jobs(
    model: Path, jobs: Sequence[Job[Any]], algorithm: AlgorithmConfig, out: Path, *, worker: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and saved state after `jobs`: of a runner as a run has it, or of a worker that takes them from files."""
    jobs = [*jobs, Save(out / "state"), Export(out / "model", "float32")]
    files = JobQueue(out / "jobs")

    async def use(dispatch: WorkerDispatch) -> None:
        runner = Runner(dispatch)
        if not worker:
            for job in jobs:
                await runner.run(job)
            return
        names = [files.submit(job) for job in jobs]
        assert files.take_turn() is not None
        assert await JobWorker(files, runner).run(asyncio.Event(), until_empty=True) == len(names)
        assert files.failed() == []

    in_dispatch([RoleSpec(POLICY, TRAINER, model, {OBJECTIVE: Objective(algorithm)})], use)
    return load_tensors(out / "model"), state_tensors(out / "state")


def state_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of a saved state of one rank."""
    (file,) = folder.glob("*.safetensors")
    return {name: each for name, each in load_file(file).items() if not name.startswith("random|")}
