"""A process that submits or executes jobs until it is killed: ``python job_file_commands.py HOW DIRECTORY``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from engine_batches import make_batch
from waiting import HANG_S

from weightlane.ckpt_engines import ConfigError, WorkerDiedError
from weightlane.trainer import AlgorithmConfig, LocalRanks, Objective, RoleSpec, TrainerConfig, WorkerDispatch
from weightlane.trainer.algorithms.roles import OBJECTIVE, POLICY
from weightlane.trainer.runner.job_queue.job_queue import JobQueue
from weightlane.trainer.runner.job_worker import JobWorker
from weightlane.trainer.runner.jobs import Forward, Publish
from weightlane.trainer.runner.runner import Runner

MODEL = "WEIGHTLANE_TEST_MODEL"
PLACE = "WEIGHTLANE_TEST_JOBS"
"""Place and options, as JSON, of a queue that is not in the directory."""
LEASE_S = 6.0
DEADLY = "deadly"
"""A loss during which ranks are lost."""


def deadly(*_: Any) -> NoReturn:
    raise WorkerDiedError("a rank died.", part="test")


LOSSES = {OBJECTIVE: Objective(AlgorithmConfig()), DEADLY: deadly}


def queue_of(directory: Path) -> JobQueue:
    """The queue that a test has chosen: a store, or `directory`, which has a test's other files in any case."""
    if place := os.environ.get(PLACE):
        url, options = json.loads(place)
        return JobQueue(url, options, lease_s=LEASE_S, poll_s=0.05)
    return JobQueue(directory)


def submit(directory: Path) -> None:
    """Submit jobs for ever, and tell how many."""
    files, count = JobQueue(directory), 0
    while True:
        files.submit(Publish(count, f"process-{os.getpid()}"))
        files.submit(Forward(make_batch(0)))
        count += 1
        print(count, flush=True)


def serve(directory: Path) -> None:
    """Be a worker that computes nothing, until there is a file called `end`. What it begins and has done is noted.

    The result of a version is its number. Every fifth one fails.
    """
    queue = queue_of(directory)
    print("ready", flush=True)
    while (end_turn := queue.take_turn()) is None:
        time.sleep(0.2)
    with (directory / f"served-by-{os.getpid()}.txt").open("a") as notes:

        def note(what: str, name: str) -> None:
            notes.write(f"{what} {name}\n")
            notes.flush()

        if queue.recover():
            queue.requeue()
        while not (directory / "end").exists():
            if (taken := queue.take()) is None:
                time.sleep(0.1)
                continue
            note("begun", taken.name)
            assert isinstance(taken.job, Publish)
            if taken.job.version % 5 == 0:
                queue.end_job(taken.name, ConfigError("it is a multiple of five.", part="test"))
            else:
                queue.write_result(taken.name, taken.job.version)
                queue.end_job(taken.name)
            note("done", taken.name)
    end_turn()


def work(directory: Path) -> None:
    """Be a worker of the directory, on the model in `MODEL`, until there is a file called `end`."""
    spec = RoleSpec(POLICY, TrainerConfig(device="cpu", learning_rate=3e-3), Path(os.environ[MODEL]), LOSSES)
    queue = queue_of(directory)
    print("ready", flush=True)
    while (end_turn := queue.take_turn()) is None:
        time.sleep(0.01)

    async def run() -> None:
        dispatch, ended = WorkerDispatch([spec], {"trainer": LocalRanks(HANG_S)}), asyncio.Event()
        await dispatch.start()
        working = asyncio.create_task(JobWorker(queue, Runner(dispatch)).run(ended))
        while not working.done() and not (directory / "end").exists():  # noqa: ASYNC110 - made by another process
            await asyncio.sleep(0.01)
        ended.set()
        await working
        await dispatch.close()

    asyncio.run(run())
    end_turn()


if __name__ == "__main__":
    {"submit": submit, "work": work, "serve": serve}[sys.argv[1]](Path(sys.argv[2]))
