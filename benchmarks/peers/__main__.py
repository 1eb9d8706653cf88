"""Runs the peers in turns; see the package's docstring."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.command import Report, finish, options_of, say
from weightlane.ckpt_engines import ConfigError
from weightlane.cli.bench.workload.workload import MODELS, Workload, named_workload

from .halves import Peer
from .others import CATALOGUE
from .report import rows_of, text

ROOT = Path(__file__).resolve().parents[2]
MEASURE = "from benchmarks.peers.measure import main; main()"
"""Not run by ``-m``: the processes that the peer starts would import this main module again."""
END_S = 3.0
TMPFS = "/dev/shm"  # noqa: S108 - everything goes into fresh folders below it


def run(options: argparse.Namespace, names: Sequence[str]) -> Report:
    """Measure the peers `names`, forwards and backwards in turn, so that changes of the machine meet everybody."""
    workload = workload_named(options.model)
    peers = {name: peer for name, peer in CATALOGUE.items() if name in set(names)}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    passes = min(options.passes, options.rounds)
    for number in range(passes):
        rounds = options.rounds * (number + 1) // passes - options.rounds * number // passes
        for name in list(peers) if number % 2 == 0 else reversed(list(peers)):
            if not any(each.keys() & {"unavailable", "failed"} for each in answers[name]):
                found = turn(options, workload, peers[name], rounds)
                answers[name] += found
                say(f"pass {number + 1} of {passes}, {name}: {outcome(found)}")
    rows = rows_of(peers, answers)
    about = {"name": workload.name, "payload_bytes": workload.nbytes, "tensors": len(workload.specs)}
    return {
        "workload": {**about, "receivers": options.receivers},
        "rows": rows,
        "verified": all(row.get("verified", True) for row in rows),
        "met": not any("failed" in row for row in rows),
    }


def workload_named(name: str) -> Workload:
    """The workload of `name`: a model that `weightlane bench` knows, or a directory of safetensors files.

    Raises `ConfigError` when `name` is neither, or not all of its tensors are bfloat16.
    """
    workload = named_workload(name)
    if any(spec.dtype is not torch.bfloat16 for spec in workload.specs):
        raise ConfigError(f"not all tensors of {name} are bfloat16, which is what peers carry here.", part="peers")
    return workload


def turn(options: argparse.Namespace, workload: Workload, peer: Peer, rounds: int) -> list[dict[str, Any]]:
    """The answers of one peer's turn, in a process of its own that is gone afterwards with everything it started."""
    with _folders() as (memory_dir, disk_dir):
        order = {"peer": peer.name, "workload": workload.to_plain(), "receivers": options.receivers, "rounds": rounds}
        order |= {"turn_s": options.turn_s, "deadline_s": options.deadline_s}
        order |= {"memory_dir": str(memory_dir), "disk_dir": str(disk_dir)}
        home = memory_dir / "home"  # some peers leave files there
        home.mkdir()
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment = {**os.environ, **threads, "HOME": str(home), "PYTHONPATH": str(ROOT), **peer.environment}
        with tempfile.TemporaryFile("w+") as complaints:
            process = subprocess.Popen(  # noqa: S603 - this program
                [sys.executable, "-c", MEASURE],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                start_new_session=True,
            )
            try:
                answer, _ = process.communicate(json.dumps(order), timeout=options.block_s)
            except subprocess.TimeoutExpired:
                return [{"failed": f"it did not end within {options.block_s:.0f} s"}]
            finally:
                _end(process)
            answers = [json.loads(line) for line in answer.splitlines()]
            if not answers or not answers[-1].keys() & {"done", "failed", "unavailable"}:
                complaints.seek(0)
                last = (complaints.read().strip().splitlines() or ["without a word"])[-1]
                answers.append({"failed": f"its process ended with exit code {process.returncode}: {last}"})
            return answers


def outcome(answers: Sequence[dict[str, Any]]) -> str:
    """Outcome of a turn, in a line."""
    for each in answers:
        for kind in each.keys() & {"unavailable", "failed"}:
            return f"{kind}: {each[kind]}"
    return " ".join(
        f"{each['latency_s']:.3f}{'' if each['verified'] else ' WRONG'}" for each in answers if "round" in each
    )


def _end(process: subprocess.Popen[str]) -> None:
    """End the process, its group, and whatever else it started and is still there."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=END_S)
    for each in family:
        # Python's own tracker ends when the others have, after removing the semaphores they left in shared memory.
        with contextlib.suppress(psutil.Error):
            if "multiprocessing.resource_tracker" not in " ".join(each.cmdline()):
                each.kill()
    process.kill()
    process.communicate()


@contextlib.contextmanager
def _folders() -> Iterator[tuple[Path, Path]]:
    """A folder on tmpfs and one on disk."""
    folders = Path(tempfile.mkdtemp(prefix="peers-", dir=TMPFS)), Path(tempfile.mkdtemp(prefix="peers-"))
    try:
        yield folders
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON. Exit code 1 when a peer that ran delivered wrong values or failed."""
    parser = options_of(__doc__, rounds=5, deadline_s=60.0)
    models = ", ".join(MODELS)
    parser.add_argument(
        "--model", default="qwen3-0.6b", help=f"{models}, or a directory of safetensors files, all bfloat16"
    )
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument(
        "--passes", type=int, default=2, help="how often to go through the list, a part of the rounds each"
    )
    parser.add_argument("--turn-s", type=float, default=20.0, help="seconds of rounds after which a turn ends early")
    parser.add_argument("--block-s", type=float, default=240.0, help="most seconds of a turn from start to end")
    parser.add_argument("--only", help="names, or beginnings of names, separated by commas; limits are always measured")
    parser.add_argument("--list", action="store_true", help="print what there is and measure nothing")
    options = parser.parse_args(arguments)
    if min(options.receivers, options.rounds, options.passes) < 1:
        parser.error("--receivers, --rounds and --passes must be at least 1")
    asked = tuple((options.only or "").split(","))
    names = [name for name, peer in CATALOGUE.items() if name.startswith(asked) or peer.group == "limit"]
    if options.list:
        print("\n".join(f"{name:30} {CATALOGUE[name].what}" for name in names))
        return 0
    return finish("peers", lambda: run(options, names), text, options.json)


if __name__ == "__main__":
    sys.exit(main())
