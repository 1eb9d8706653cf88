"""Runs the peers in turns and puts together what they measured."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weightlane.cli.bench.workload.workload import named_workload

from .catalogue import catalogue
from .cpu_guard import descendants, wait_until_quiet
from .peer import Peer
from .report import report_of
from .workload import Workload

_ROOT = Path(__file__).resolve().parents[2]
_MEASURE = f"from {__package__}.measure import main; main()"
"""Not run by ``-m``: the processes that the peer spawns would import this main module again, and with it every other peer."""
_TERM_S = 3.0
_TMPFS = "/dev/shm"  # noqa: S108 - everything goes into fresh folders below it


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a run: the workload, how many rounds and turns each peer has, and the time limits."""

    workload: str
    """Name of a workload of `weightlane bench`, or a directory of safetensors files."""
    receivers: int
    rounds: int
    """Per peer, over all passes; each pass has a warm-up round beside."""
    passes: int = 2
    """How often the whole list is gone through: what changes on the machine meanwhile then meets everybody."""
    repeats: int = 2
    """How often, after that, peers have another turn of which others disturbed more than half of the rounds."""
    retries: int = 1
    """How often a turn that failed is repeated at once."""
    turn_s: float = 20.0
    """After so many seconds of rounds a turn ends early, with one round that counts at least: slow peers have fewer."""
    deadline_s: float = 60.0
    """For every single wait of a peer."""
    block_s: float = 240.0
    """For one peer in one pass, from starting its process to its end."""
    quiet_s: float = 30.0
    """How long to wait for a quiet machine before a peer's turn."""
    interpreters: Mapping[str, str] = field(default_factory=dict)
    """Other Python interpreters, by peer: for those whose dependencies exclude each other."""
    lock: Path | None = None
    """A file that is locked while peers run, where several programs share the machine."""
    lock_s: float = 150.0
    """How long the lock is held before others get their turn, plus the rest of a peer's."""


def run(
    plan: Plan,
    names: Sequence[str],
    said: Callable[[str], None] = print,
    save: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure the peers `names` and return the report, as README.md describes it.

    Args:
        plan: How.
        names: Of rows of the catalogue.
        said: Called with a line after every turn.
        save: Called with what the report is so far after every turn: an interrupted run is not lost.

    Raises:
        ConfigError: there is no such workload.
        ValueError: plan makes no sense, or the workload is not all bfloat16.
    """
    if plan.receivers < 1 or plan.rounds < 1 or plan.passes < 1:
        raise ValueError("receivers, rounds and passes must be at least 1")
    workload = workload_named(plan.workload)
    peers = {name: peer for name, peer in catalogue().items() if name in set(names)}
    words: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    passes = min(plan.passes, plan.rounds)
    lock = _SharedLock(plan.lock, plan.lock_s)
    for turn in range(passes + plan.repeats):
        # Back and forth, so that a machine that slows down does not favour whoever comes first.
        for name in list(peers) if turn % 2 == 0 else reversed(list(peers)):
            if turn < passes:
                rounds = plan.rounds * (turn + 1) // passes - plan.rounds * turn // passes
            else:
                rounds = _missing_rounds(plan, words[name])
            if rounds and not any("unavailable" in word or "failed" in word for word in words[name]):
                heard = _turn(plan, workload, peers[name], rounds, lock, said)
                words[name] += heard
                if save is not None:
                    save(report_of(plan.passes, plan.receivers, workload, peers, words))
                said(f"{f'pass {turn + 1}/{passes}' if turn < passes else 'again'}  {name}: {_outcome(heard)}")
    return report_of(plan.passes, plan.receivers, workload, peers, words)


def _turn(
    plan: Plan, workload: Workload, peer: Peer, rounds: int, lock: _SharedLock, said: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One peer's turn, repeated when it failed: on a busy machine a deadline passes, or somebody tidies shared memory up."""
    heard = _block(plan, workload, peer, rounds, lock)
    for _ in range(plan.retries):
        if not any("failed" in word for word in heard):
            break
        said(f"{peer.name}: {_outcome(heard)}; once more")
        heard = [{"failed_before": heard[-1]["failed"]}, *_block(plan, workload, peer, rounds, lock)]
    return heard


def workload_named(name: str) -> Workload:
    """Return the workload of `name`: a model that `weightlane bench` knows, or a directory of safetensors files.

    Raises:
        ConfigError: `name` is neither.
        ValueError: not all of its tensors are bfloat16.
    """
    specs = named_workload(name).specs
    if any(spec.dtype is not torch.bfloat16 for spec in specs):
        raise ValueError(f"not all tensors of {name} are bfloat16, which is what peers carry here")
    return Workload(name, {spec.name: spec.shape for spec in specs})


def _missing_rounds(plan: Plan, words: Sequence[Mapping[str, Any]]) -> int:
    """How many more rounds a peer should have; none when the undisturbed ones are half of what was wanted."""
    clean = sum("round" in word and not word["warm_up"] and word["clean"] for word in words)
    short = any(word.get("out_of_time") for word in words)
    return 0 if clean >= (1 if short else (plan.rounds + 1) // 2) else plan.rounds - clean


def _block(plan: Plan, workload: Workload, peer: Peer, rounds: int, lock: _SharedLock) -> list[dict[str, Any]]:
    """One peer's turn, in a process of its own that is gone afterwards with everything it started."""
    with lock.held(), _folders() as (memory_dir, disk_dir):
        quiet = wait_until_quiet(plan.quiet_s) if plan.quiet_s else True
        order = {
            "peer": peer.name,
            "workload": workload.to_plain(),
            "receivers": plan.receivers,
            "rounds": rounds,
            "turn_s": plan.turn_s,
            "deadline_s": plan.deadline_s,
            "memory_dir": str(memory_dir),
            "disk_dir": str(disk_dir),
        }
        home = memory_dir / "home"  # some peers leave files there
        home.mkdir()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "HOME": str(home),
            **peer.environment,
        }
        python = plan.interpreters.get(peer.name, sys.executable)
        with tempfile.TemporaryFile("w+") as complaints:
            process = subprocess.Popen(  # noqa: S603 - this program
                [python, "-c", _MEASURE],
                cwd=_ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                start_new_session=True,
            )
            late = False
            try:
                answer, _ = process.communicate(json.dumps(order), timeout=plan.block_s)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                _end(process)
            if late:
                return [{"failed": f"it did not end within {plan.block_s:.0f} s"}]
            words = [json.loads(line) for line in answer.splitlines()]
            if not words or not words[-1].keys() & {"done", "failed", "unavailable"}:
                complaints.seek(0)
                last = (complaints.read().strip().splitlines() or ["without a word"])[-1]
                words.append({"failed": f"its process ended with exit code {process.returncode}: {last}"})
            return [{**word, "quiet": quiet} for word in words]


def _end(process: subprocess.Popen[str]) -> None:
    """End the process, its group, and whatever else it started and is still there."""
    family = [process.pid, *descendants(process.pid)]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_TERM_S)
    for pid in family:
        # Python's own tracker ends when the others have, after removing the semaphores they left in shared memory.
        with contextlib.suppress(OSError):
            if b"multiprocessing.resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    process.communicate()


class _SharedLock:
    """A file lock that is given to others now and then, between two peers' turns."""

    def __init__(self, path: Path | None, longest_s: float) -> None:
        self._longest_s = longest_s
        self._file = path.open("a") if path is not None else None
        self._since = 0.0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock during the block, and maybe on to the next one."""
        if self._file is None:
            yield
            return
        if not self._since:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._since = time.monotonic()
        yield
        if time.monotonic() - self._since > self._longest_s:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._since = 0.0
            time.sleep(1.0)  # or we would have it back before anybody noticed


@contextlib.contextmanager
def _folders() -> Iterator[tuple[Path, Path]]:
    """A folder on tmpfs and one on disk."""
    memory = Path(tempfile.mkdtemp(prefix="peers-", dir=_TMPFS))
    disk = Path(tempfile.mkdtemp(prefix="peers-", dir=os.environ.get("PEERS_DISK_DIR")))
    try:
        yield memory, disk
    finally:
        for folder in (memory, disk):
            shutil.rmtree(folder, ignore_errors=True)


def _outcome(words: Sequence[dict[str, Any]]) -> str:
    for word in words:
        for kind in ("unavailable", "failed"):
            if kind in word:
                return f"{kind}: {word[kind]}"
    times = [f"{word['latency_s']:.3f}{'' if word['clean'] else '*'}" for word in words if "round" in word]
    wrong = [word["round"] for word in words if "round" in word and not word["verified"]]
    return " ".join(times) + " s" + (f"; rounds {wrong} delivered WRONG values" if wrong else "")
