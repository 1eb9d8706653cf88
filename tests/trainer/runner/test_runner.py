"""`Runner`: jobs train what the calls that they stand for would, in order; each fails alone, is told and is counted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_batches import make_batch
from local_dispatch import in_dispatch
from safetensors.torch import load_file

from weightlane.ckpt_engines import ClosedError, ConfigError, ProtocolError, WeightlaneError
from weightlane.plugins import hookimpl, make_hooks
from weightlane.trainer import (
    AlgorithmConfig,
    LoraConfig,
    Objective,
    TokenBatch,
    TokenSequence,
    TrainerConfig,
    sft,
)
from weightlane.trainer.algorithms.composition import algorithm_over, policy_objective, role_names, role_specs
from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.engines.fsdp2.engine import Fsdp2Engine
from weightlane.trainer.objectives.config import CriticConfig
from weightlane.trainer.objectives.loss import LOGPROBS
from weightlane.trainer.objectives.policy_values import REWARD
from weightlane.trainer.runner.job_queue.job_queue import JobQueue
from weightlane.trainer.runner.job_worker import JobWorker
from weightlane.trainer.runner.jobs import (
    CreateAdapter,
    Export,
    Forward,
    ForwardBackward,
    Job,
    JointJob,
    Load,
    OptimStep,
    RlStep,
    Save,
    SftStep,
)
from weightlane.trainer.runner.runner import Runner

ALGORITHM = AlgorithmConfig(objective="ppo")
TRAINER = TrainerConfig(device="cpu", learning_rate=3e-3)
OUT_OF_VOCABULARY = TokenBatch((TokenSequence.of_completion([1], [10**6]),))


def judged(step: int) -> TokenBatch:
    sequences = make_batch(step).sequences
    rewarded = [
        TokenSequence(each.tokens, each.targets, each.per_token, {**each.per_sequence, REWARD: 0.1 * row})
        for row, each in enumerate(sequences)
    ]
    return TokenBatch(tuple(rewarded))


def with_dispatch(
    models: Mapping[str, Path],
    use: Callable[[WorkerDispatch], Awaitable[Any]],
    algorithm: AlgorithmConfig = AlgorithmConfig(),  # noqa: B008 - it cannot be changed
    trainer: TrainerConfig = TRAINER,
) -> Any:
    """The result of `use` on a dispatch of the algorithm's roles, in this process."""
    paths = dict.fromkeys(role_names(algorithm), models["qwen3-untied"])
    objective = Objective(policy_objective(algorithm))
    return in_dispatch(role_specs(algorithm, trainer, CriticConfig(), paths, objective), use)


def crash(outputs: Any, micro: Any) -> Any:
    """A loss that fails without a message, as a bare assertion does."""
    raise ZeroDivisionError


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.exhaustive
def test_steps_by_jobs_are_bit_for_bit_those_of_the_algorithm_and_resume_as_it_does(
    models: dict[str, Path], tmp_path: Path
) -> None:
    async def by_calls(dispatch: WorkerDispatch) -> list[float]:
        algorithm = algorithm_over(dispatch, ALGORITHM)
        norms = [(await algorithm.train_step(judged(step))).grad_norm for step in range(2)]
        await dispatch["policy"].export_hf(tmp_path / "calls", "float32")
        return norms

    async def by_jobs(dispatch: WorkerDispatch) -> list[float]:
        runner = Runner(dispatch, algorithm_over(dispatch, ALGORITHM))
        norms = [(await runner.train_step(judged(0))).grad_norm]
        await runner.run(Save(tmp_path / "state" / "trainer"))
        await runner.run(RlStep(judged(5)))  # lost by what follows
        assert await runner.run(Load(tmp_path / "state" / "trainer")) == 1
        norms.append((await runner.run(RlStep(judged(1)))).grad_norm)
        await runner.run(Export(tmp_path / "jobs", "float32"))
        return norms

    assert with_dispatch(models, by_calls, ALGORITHM) == with_dispatch(models, by_jobs, ALGORITHM)
    calls, jobs, before = (weights_in(each) for each in (tmp_path / "calls", tmp_path / "jobs", models["qwen3-untied"]))
    assert [name for name in calls if not torch.equal(calls[name], jobs[name])] == []
    assert any(not torch.equal(calls[name], before[name]) for name in calls), "training changes weights"


def test_a_job_fails_alone_with_a_typed_error_and_every_end_is_told_and_counted(models: dict[str, Path]) -> None:
    told: list[tuple[str, str]] = []

    class Observer:
        @hookimpl
        def job_finished(self, kind: str, facts: Mapping[str, Any]) -> None:
            told.append((kind, facts["error"]))

    async def use(dispatch: WorkerDispatch) -> None:
        runner = Runner(dispatch, hooks=make_hooks([Observer()]))
        jobs: list[Job[Any]] = [
            Forward(OUT_OF_VOCABULARY),
            ForwardBackward(make_batch(0), crash),
            OptimStep(),  # of a mini-batch without a gradient
            ForwardBackward(make_batch(0), "likelihood"),
            Forward(make_batch(1)),
        ]
        answers = await asyncio.gather(*map(runner.submit, jobs), return_exceptions=True)
        kinds = [type(answer) for answer in answers]
        assert kinds == [ProtocolError, WeightlaneError, ProtocolError, ProtocolError, list]
        assert "ZeroDivisionError" in str(answers[1])
        assert [kind for kind, _ in told] == [job.kind for job in jobs]
        assert [bool(error) for _, error in told] == [True, True, True, True, False]
        figures = runner.figures
        counts = {kind: (each.count, each.failures) for kind, each in figures.items()}
        assert counts == {"forward": (2, 1), "forward_backward": (2, 2), "optim_step": (1, 1)}
        assert figures["forward"].tokens == 1 + sum(each.length for each in make_batch(1).sequences)

    with_dispatch(models, use)


def test_joint_jobs_share_one_pass_and_each_fails_by_its_own_error(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their results are those of `test_joint_parts`."""
    passes: list[int] = []
    run_model = Fsdp2Engine._answer

    def counted(self: Fsdp2Engine, layout: Any, query: Any) -> Any:
        passes.append(len(layout.micro.tokens))
        return run_model(self, layout, query)

    monkeypatch.setattr(Fsdp2Engine, "_answer", counted)
    batches = {name: make_batch(number) for number, name in enumerate("abc")}
    jobs = {name: ForwardBackward(batch, sft, outputs=LOGPROBS, adapter=name) for name, batch in batches.items()}

    async def use(dispatch: WorkerDispatch) -> None:
        runner = Runner(dispatch)

        for name in (*batches, "d"):
            await runner.run(CreateAdapter(name, LoraConfig(rank=2, seed=ord(name))))
        wrong = (ForwardBackward(OUT_OF_VOCABULARY, sft, adapter="d"), OptimStep("e"))
        *answers, refused, unknown = await runner.run(JointJob((*jobs.values(), *wrong)))
        assert passes == [sum(each.length for batch in batches.values() for each in batch.sequences)]
        assert (type(refused), type(unknown)) == (ProtocolError, ConfigError)
        *steps, spoiled = await runner.run(JointJob((*map(OptimStep, batches), OptimStep("d"))))
        assert isinstance(spoiled, ProtocolError)
        assert [step.step for step in steps] == [1, 1, 1]
        for answer, batch in zip(answers, batches.values(), strict=True):
            assert [len(each["logprobs"]) for each in answer.outputs] == [each.length for each in batch.sequences]
        with pytest.raises(WeightlaneError, match="ZeroDivisionError"):
            await runner.run(JointJob((jobs["a"], ForwardBackward(batches["c"], crash, adapter="c"))))
        with pytest.raises(ProtocolError, match=r"no gradient: ZeroDivisionError"):
            await runner.run(OptimStep("a"))

    trainer = TRAINER.model_copy(update={"lora": LoraConfig(rank=4), "micro_batch_tokens": 4096})
    with_dispatch(models, use, trainer=trainer)


def test_jobs_wait_for_their_turn_and_those_whose_caller_left_or_that_were_closed_do_not_begin(
    models: dict[str, Path],
) -> None:
    ended: list[str] = []

    class Observer:
        @hookimpl
        def job_finished(self, kind: str) -> None:
            ended.append(kind)

    async def use(dispatch: WorkerDispatch) -> None:
        runner = Runner(dispatch, hooks=make_hooks([Observer()]))
        first = runner.submit(SftStep(make_batch(0)))
        leaving = asyncio.create_task(runner.run(OptimStep()))
        await asyncio.sleep(0)
        last = runner.submit(Forward(make_batch(1)))
        assert ended == []
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert len(await last) == len(make_batch(1))
        assert first.result().step == 1
        assert ended == ["sft_step", "forward"]
        begun, behind = runner.submit(Forward(make_batch(0))), runner.submit(Forward(make_batch(1)))
        await asyncio.sleep(0)
        await runner.close()
        for each in (begun, behind):
            assert isinstance(each.exception(), ClosedError)
        with pytest.raises(ClosedError):
            runner.submit(OptimStep())

    with_dispatch(models, use)


def test_the_program_of_the_guide_trains_and_saves(models: dict[str, Path], tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/roles.md").read_text()
    names: dict[str, Any] = {"Path": Path}
    for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        if "trainer.runner" in block:
            exec(block, names)

    async def use(dispatch: WorkerDispatch) -> float:
        loss: float = await names["step_and_save"](dispatch, make_batch(0), tmp_path / "state")
        ended, queue = asyncio.Event(), JobQueue(tmp_path / "jobs")
        assert queue.take_turn() is not None
        working = asyncio.create_task(JobWorker(queue, Runner(dispatch)).run(ended))
        result = await asyncio.to_thread(names["step_in"], queue, tmp_path, make_batch(0))
        ended.set()
        await working
        assert result.step == 2
        return loss

    assert 0 < with_dispatch(models, use) < 10
    assert list((tmp_path / "state").iterdir())
    assert not list((tmp_path / "jobs/results").glob("*1-*.job"))
