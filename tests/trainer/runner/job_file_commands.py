"""A process that submits or takes jobs until it is killed: ``python job_file_commands.py HOW DIRECTORY``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from engine_batches import make_batch

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.runner.job_files import JobFiles
from weightlane.trainer.runner.jobs import Forward, Publish

HANG = "hang"


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


if __name__ == "__main__":
    {"submit": submit, "take": take}[sys.argv[1]](Path(sys.argv[2]))
