"""A process that submits or takes jobs until it is killed: ``python job_file_commands.py HOW DIRECTORY``."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from engine_batches import make_batch

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.runner.job_files import JobFiles
from weightlane.trainer.runner.jobs import Forward, Publish


def submit(directory: Path) -> None:
    """Submit jobs for ever, and tell how many."""
    files, count = JobFiles(directory), 0
    while True:
        files.submit(Publish(count, f"process-{os.getpid()}"))
        files.submit(Forward(make_batch(0)))
        count += 1
        print(count, flush=True)


def take(directory: Path) -> None:
    """Take jobs once there is a line to read, until there is none.

    Each is noted in a file of this process before it is executed, and one in seven fails.
    """
    files, rng = JobFiles(directory), random.Random(os.getpid())
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
            time.sleep(rng.uniform(0, 0.02))
            if rng.random() < 1 / 7:
                taken.fail(ConfigError("it drew a seven.", part="test"))
            else:
                taken.done()


if __name__ == "__main__":
    {"submit": submit, "take": take}[sys.argv[1]](Path(sys.argv[2]))
