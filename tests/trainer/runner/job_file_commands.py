"""A process that submits or takes jobs until it is killed: ``python job_file_commands.py HOW DIRECTORY``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from engine_batches import make_batch
from waiting import HANG_S

from weightlane.ckpt_engines import ConfigError, WorkerDiedError
from weightlane.trainer import AlgorithmConfig, LocalRanks, Objective, RoleSpec, TrainerConfig, WorkerDispatch
from weightlane.trainer.algorithms.roles import OBJECTIVE, POLICY
from weightlane.trainer.runner.job_files import JobFiles
from weightlane.trainer.runner.job_queue.contract import JobQueue
from weightlane.trainer.runner.job_queue.job_store import JobStore
from weightlane.trainer.runner.job_worker import JobWorker
from weightlane.trainer.runner.jobs import Forward, Publish
from weightlane.trainer.runner.runner import Runner

HANG = "hang"
MODEL = "WEIGHTLANE_TEST_MODEL"
STORE = "WEIGHTLANE_TEST_STORE"
"""URL and options, as JSON, of a store in the place of the directory."""
LEASE_S = 6.0
DEADLY = "deadly"
"""A loss during which ranks are lost."""


def deadly(*_: Any) -> NoReturn:
    raise WorkerDiedError("a rank died.", part="test")


LOSSES = {OBJECTIVE: Objective(AlgorithmConfig()), DEADLY: deadly}


def queue_of(directory: Path) -> JobQueue:
    """The queue that a test has chosen, which has other files in `directory` in any case."""
    if place := os.environ.get(STORE):
        url, options = json.loads(place)
        return JobStore(url, options, lease_s=LEASE_S, poll_s=0.05)
    return JobFiles(directory)


def submit(directory: Path) -> None:
    """Submit jobs for ever, and tell how many."""
    files, count = JobFiles(directory), 0
    while True:
        files.submit(Publish(count, f"process-{os.getpid()}"))
        files.submit(Forward(make_batch(0)))
        count += 1
        print(count, flush=True)


def take(directory: Path) -> None:
    """Take jobs once there is a line to read, until there is none and a file called `end`.

    Each is noted in a file of this process before it is executed. Every seventh version fails, and one of `HANG` never ends.
    """
    files = JobFiles(directory)
    print("ready", flush=True)
    sys.stdin.readline()
    with (directory / f"taken-by-{os.getpid()}.txt").open("a") as notes:
        while True:
            taken = files.take()
            if taken is None:
                if (directory / "end").exists():
                    return
                time.sleep(0.001)
                continue
            notes.write(f"{taken.name}\n")
            notes.flush()
            assert isinstance(taken.job, Publish)
            if taken.job.adapter == HANG:
                signal.pause()
            if taken.job.version % 7 == 0:
                taken.fail(ConfigError("it is a multiple of seven.", part="test"))
            else:
                taken.done()


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

        for left in queue.recover():
            left.requeue()
        while not (directory / "end").exists():
            if (taken := queue.take()) is None:
                time.sleep(0.1)
                continue
            note("begun", taken.name)
            assert isinstance(taken.job, Publish)
            if taken.job.version % 5 == 0:
                taken.fail(ConfigError("it is a multiple of five.", part="test"))
            else:
                queue.write_result(taken.name, taken.job.version)
                taken.done()
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
    {"submit": submit, "take": take, "work": work, "serve": serve}[sys.argv[1]](Path(sys.argv[2]))
