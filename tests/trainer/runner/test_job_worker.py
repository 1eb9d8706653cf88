"""`JobWorker`: queued jobs train what a runner would, whatever worker is killed, and each is executed once in effect."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import job_file_commands
import pytest
import torch
from engine_batches import make_batch
from local_dispatch import in_dispatch
from safetensors.torch import load_file
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import (
    ConfigError,
    DeadlineExceededError,
    ProtocolError,
    SyncAbortedError,
    WorkerDiedError,
)
from weightlane.cli.config.worker_config import RolloutsSection
from weightlane.cli.run.version_publishing import VersionPublishing
from weightlane.sync import CheckpointEngineConfig, SyncConfig, read_version
from weightlane.trainer import LoraConfig, LossDenominators, TokenBatch, TokenSequence, TrainerConfig
from weightlane.trainer.algorithms.roles import OBJECTIVE, POLICY
from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.dispatch.role_spec import RoleSpec
from weightlane.trainer.runner import job_worker
from weightlane.trainer.runner.job_queue.job_queue import JobQueue
from weightlane.trainer.runner.job_worker import JobWorker
from weightlane.trainer.runner.jobs import (
    CreateAdapter,
    Export,
    Forward,
    ForwardBackward,
    Job,
    OptimStep,
    Publish,
    RlStep,
    Save,
    SftStep,
)
from weightlane.trainer.runner.runner import Runner

OUT_OF_VOCABULARY = TokenBatch((TokenSequence.of_completion([1], [10**6], per_token={}),))
OF_TWO = LossDenominators(50.0, 7.0)
SETTINGS = TrainerConfig(device="cpu", learning_rate=3e-3)
Process = subprocess.Popen[str]


def jobs_for(folder: Path) -> list[Job[Any]]:
    """Jobs of most kinds, two of which fail: a part of a mini-batch, and the step that ends it."""
    return [
        CreateAdapter("a", LoraConfig(rank=2)),
        ForwardBackward(make_batch(8), OBJECTIVE, adapter="a"),
        OptimStep("a"),
        SftStep(make_batch(0)),
        ForwardBackward(make_batch(1), OBJECTIVE, outputs=("logprobs",)),
        Save(folder / "open"),  # without the gradient of that part
        OptimStep(),
        RlStep(make_batch(2)),
        Save(folder / "state"),
        SftStep(make_batch(3)),
        Forward(make_batch(4), adapter="a"),
        ForwardBackward(make_batch(7), OBJECTIVE, OF_TWO),
        ForwardBackward(OUT_OF_VOCABULARY, OBJECTIVE, OF_TWO),
        OptimStep(),
        SftStep(make_batch(5)),
        RlStep(make_batch(6)),
        Export(folder / "model", "float32"),
    ]


@pytest.fixture
def start(children: Any, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Process]:
    """Starts a worker of a directory, which has begun then."""
    monkeypatch.setenv(job_file_commands.MODEL, str(models["qwen3-untied"]))

    def start(directory: Path) -> Process:
        program = [job_file_commands.__file__, "work", str(directory)]
        child: Process = children.start(program, forked=True, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    return start


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def told(result: Any) -> Any:
    """A result without the seconds that it took."""
    if hasattr(result, "grad_norm"):
        return (result.step, dict(result.metrics), result.grad_norm, result.skipped)
    return (dict(result.metrics), result.outputs) if hasattr(result, "metrics") else result


def test_jobs_whose_workers_are_killed_train_what_a_runner_does_and_have_its_results(
    start: Callable[[Path], Process], models: dict[str, Path], tmp_path: Path
) -> None:
    spec = RoleSpec(POLICY, SETTINGS, models["qwen3-untied"], job_file_commands.LOSSES)

    async def by_a_runner(dispatch: WorkerDispatch) -> list[Any]:
        runner, found = Runner(dispatch), list[Any]()
        for job in jobs_for(tmp_path / "runner"):
            try:
                found.append(told(await runner.run(job)))
            except ProtocolError as error:
                found.append(type(error))
        return found

    expected = in_dispatch([spec], by_a_runner)
    assert [place for place, result in enumerate(expected) if result is ProtocolError] == [12, 13]
    files, names = JobQueue(tmp_path / "jobs"), list[str]()

    def finished() -> bool:
        """Whether all jobs so far have a result, or an error."""
        try:
            return all(files.finished(name) is not None for name in names if name not in failing)
        except ProtocolError:
            failing.update(each.name for each in files.failed())
            return False

    def active() -> list[Process]:
        return [worker for worker in workers if holds_turn(worker, tmp_path / "jobs")]

    failing: set[str] = set()
    jobs, workers = jobs_for(tmp_path / "worker"), [start(tmp_path / "jobs") for _ in range(2)]
    # Killed in the middle of a mini-batch; after a state was saved; between the jobs that fail; and while it executes something.
    for place, waits in ((2, True), (6, True), (10, True), (13, True), (15, False), (16, False)):
        names += [files.submit(job) for job in jobs[len(names) : place]]
        wait_until(
            lambda waits=waits: active() and (finished() or not waits), "a worker executes, or has executed, the jobs"
        )
        (killed,) = active()
        killed.kill()
        killed.wait(HANG_S)
        workers = [*(worker for worker in workers if worker is not killed), start(tmp_path / "jobs")]
    names += [files.submit(job) for job in jobs[len(names) :]]
    wait_until(finished, "the jobs were executed")
    (tmp_path / "jobs/end").touch()
    assert [worker.wait(HANG_S) for worker in workers] == [0, 0]
    assert files.waiting() == files.recover() == []
    assert [each.name for each in files.failed()] == [names[12], names[13]]
    for name, result in zip(names, expected, strict=True):
        if result is not ProtocolError:
            assert same(told(files.wait(name, HANG_S)), result), name
        else:
            with pytest.raises(ProtocolError):
                files.wait(name, HANG_S)
    weights, wanted = (load_file(tmp_path / each / "model/model.safetensors") for each in ("worker", "runner"))
    assert same(weights, wanted)
    assert not same(weights, load_file(models["qwen3-untied"] / "model.safetensors"))
    files.forget_result(names[0])
    with pytest.raises(DeadlineExceededError, match="a worker to execute job"):
        files.wait(names[0], 0.01)


def test_a_saved_state_is_told_though_its_worker_ends_before_it_ends_the_job(tmp_path: Path) -> None:
    files, idle = JobQueue(tmp_path / "jobs"), SimpleNamespace(run=AsyncMock(), watch=asyncio.Event().wait)
    name = files.submit(Save(tmp_path / "state"))
    end_turn = files.take_turn()
    assert end_turn is not None
    assert files.take()
    files.write_note("saved", {"job": name, "directory": str(tmp_path / "state"), "before": []})
    end_turn()
    assert files.take_turn()
    asyncio.run(JobWorker(files, cast("Runner", idle)).run(asyncio.Event(), until_empty=True))
    assert files.wait(name, HANG_S) is None


@pytest.fixture
def work(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Executes what waits in a store, as a worker that begins with the model."""
    monkeypatch.setattr(job_worker, "_DEATH_NOTICE_S", 0.0)
    spec = RoleSpec(POLICY, SETTINGS, models["qwen3-untied"], job_file_commands.LOSSES)

    def work(store: JobQueue, versions: Path | None = None) -> Any:
        """Returns how many jobs; with `versions`, the versions that were there when their publication ended."""
        stored: list[int] = []

        async def of_dispatch(dispatch: WorkerDispatch) -> Any:
            publish = None
            if versions is not None:
                engine = CheckpointEngineConfig(backend="filesystem", options={"path": str(versions)})
                publishing = VersionPublishing(dispatch[POLICY], engine, SyncConfig(), RolloutsSection(), "float32")
                await publishing.connect()

                async def publish(version: int) -> None:
                    await publishing.publish(version)
                    stored.append(read_version(str(versions))[0].version)

            try:
                count = await JobWorker(store, Runner(dispatch), publish, 2).run(asyncio.Event(), until_empty=True)
                return count if versions is None else stored
            finally:
                if versions is not None:
                    publishing.close()

        end_turn = store.take_turn()
        assert end_turn is not None
        try:
            return in_dispatch([spec], of_dispatch)
        finally:
            end_turn()

    return work


@pytest.mark.exhaustive
def test_a_job_that_ends_its_workers_is_set_aside_as_one_that_failed_and_later_ones_are_executed(
    work: Callable[..., Any], models: dict[str, Path], s3_url: str, s3_options: dict[str, str], tmp_path: Path
) -> None:
    store = JobQueue(s3_url, s3_options)
    steps = [SftStep(make_batch(0)), SftStep(make_batch(3))]
    deadly = ForwardBackward(make_batch(2), job_file_commands.DEADLY, OF_TWO)
    failing = [ForwardBackward(make_batch(1), OBJECTIVE, OF_TWO), deadly, OptimStep()]
    names = [store.submit(job) for job in (steps[0], *failing, steps[1], Export(tmp_path / "model", "float32"))]
    for _ in range(2):
        with pytest.raises(WorkerDiedError, match="a rank died"):
            work(store)
    assert work(store) == 3, "the first one was executed before"
    with pytest.raises(WorkerDiedError, match="2 workers ended while they executed this job"):
        store.finished(names[2])
    with pytest.raises(ProtocolError, match="a part of the mini-batch has no gradient: a part of it was set aside"):
        store.finished(names[3])
    store.submit(Export(tmp_path / "again", "float32"))
    work(store)  # a worker more, which executes again what changes something

    async def by_a_runner(dispatch: WorkerDispatch) -> None:
        for job in (*steps, Export(tmp_path / "wanted", "float32")):
            await Runner(dispatch).run(job)

    in_dispatch([RoleSpec(POLICY, SETTINGS, models["qwen3-untied"], job_file_commands.LOSSES)], by_a_runner)
    found, again, wanted = (load_file(tmp_path / each / "model.safetensors") for each in ("model", "again", "wanted"))
    assert same(found, wanted)
    assert same(again, wanted)


@pytest.mark.exhaustive
def test_what_a_worker_publishes_into_a_store_is_what_it_exports_bit_for_bit(
    work: Callable[..., Any], s3_url: str, s3_options: dict[str, str], tmp_path: Path
) -> None:
    store, versions = JobQueue(s3_url, s3_options), tmp_path / "versions"
    jobs = [Publish(1), SftStep(make_batch(0)), Publish(2), Export(tmp_path / "model", "float32"), Publish(1)]
    names = [store.submit(job) for job in jobs]
    assert work(store, versions) == [1, 2]
    assert isinstance(store.wait(names[2], HANG_S), float)
    with pytest.raises(SyncAbortedError, match="version 1 was to follow version 2"):
        store.wait(names[4], HANG_S)
    manifest, tensors = read_version(str(versions))
    assert manifest.version == 2
    assert same(tensors, load_file(tmp_path / "model/model.safetensors"))
    name = store.submit(Publish(3))
    work(store)
    with pytest.raises(ConfigError, match=r"publishes nowhere.*\[checkpoint_engine\]"):
        store.wait(name, HANG_S)
    name = store.submit(Publish(2))
    work(store, versions)  # again, by another worker, which has executed the step again
    store.wait(name, HANG_S)
    assert same(read_version(str(versions))[1], tensors)


def holds_turn(worker: Process, directory: Path) -> bool:
    """Whether the process has the lock of the directory's worker, by the kernel's list of locks."""
    inode = (directory / "worker").stat().st_ino if (directory / "worker").exists() else -1
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]
    return any(int(words[4]) == worker.pid and words[5].endswith(f":{inode}") for words in locks)
