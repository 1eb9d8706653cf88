"""Weights straight from the ranks that hold them to the ranks that need them, beside gathering on one rank and broadcasting.

    python -m benchmarks.direct [--model qwen3-0.6b] [--rounds 7] [--bucket-mib 32] [--json FILE]

Four processes of one thread each: two trainer ranks that hold rows of every tensor (FSDP2), two rollout ranks of one
tensor-parallel replica. All ways carry the same tensors over gloo in the same processes, in changing order, after two rounds
that are not counted.

- *gathered* is what most frameworks do, in plain torch.distributed: rank 0 gathers whole tensors bucket by bucket and
  broadcasts each to all rollout ranks while it gathers the next; every rollout rank copies what it needs out of it.
- *direct* is weightlane over its gloo engine: publish, transfer plan, commit. *direct, checksummed* with checksums on both sides.

A round changes every element, and every rollout weight is made wrong before it; both untimed. It ends when the last rollout
rank has the new weights in place. They are then compared bit for bit. The memory is that of a run of its own for each way: by
how much the peak of a process lies above what it has with nothing but its weights.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any, Self

from weightlane.ckpt_engines import WorkerDiedError
from weightlane.ckpt_engines.engines.torch_distributed.tcp_store import reserve_port
from weightlane.ckpt_engines.errors import DeadlineExceededError
from weightlane.cli.bench.report.machine import this_machine
from weightlane.cli.bench.workload.workload import Workload, named_workload
from weightlane.sync import CommitReport, Coordinator, Rendezvous, SyncConfig
from weightlane.sync.config import DEFAULT_BUCKET_MIB

from .command import finish, options_of, say
from .direct_ranks import ROLLOUTS, TRAINERS, serve

_PROCESSES = multiprocessing.get_context("forkserver")
_WARM_UP = 2


class Process:
    """A rank in a process of its own, called like an object."""

    def __init__(self, role: str, rank: int, workload: dict[str, Any], timeout_s: float) -> None:
        self.name, self._timeout_s = f"{role}-{rank}", timeout_s
        self._pipe, theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=serve, args=(theirs, role, workload, rank), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self) -> Any:
        """Return the rank's next answer from its pipe.

        Raises `DeadlineExceededError` if none comes in time, `WorkerDiedError` if the process ended or the call failed.
        """
        try:
            if not self._pipe.poll(self._timeout_s):
                raise DeadlineExceededError(
                    f"no answer within {self._timeout_s:.0f} s.",
                    part="benchmark",
                    peer=self.name,
                    hint="Give it more time with --deadline-s, or measure a smaller model.",
                )
            kind, value = self._pipe.recv()
        except EOFError:
            raise WorkerDiedError(
                "a process has ended in the middle of the run.",
                part="benchmark",
                peer=self.name,
                hint="Was it killed, for want of memory perhaps?",
            ) from None
        if kind == "error":
            raise WorkerDiedError(f"it failed:\n{value}", part="benchmark", peer=self.name, hint="See above.")
        return value

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the rank in its process and return the result."""
        self._pipe.send([method, *arguments])
        return self.answer()

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


class Ranks:
    """All processes; a context manager that ends them."""

    def __init__(self, workload: Workload, timeout_s: float) -> None:
        plain = workload.to_plain()
        self._threads = ThreadPoolExecutor(TRAINERS + ROLLOUTS)
        with ExitStack() as started:
            self.trainers = [self._start(started, "trainer", rank, plain, timeout_s) for rank in range(TRAINERS)]
            self.rollouts = [self._start(started, "rollout", rank, plain, timeout_s) for rank in range(ROLLOUTS)]
            for process in self.all:
                process.answer()
            self._ending = started.pop_all()

    @staticmethod
    def _start(started: ExitStack, *arguments: Any) -> Process:
        process = Process(*arguments)
        started.callback(process.end)
        return process

    @property
    def all(self) -> list[Process]:
        """Trainer ranks, then rollout ranks."""
        return [*self.trainers, *self.rollouts]

    def every(self, processes: Sequence[Process], method: str, *arguments: Any) -> list[Any]:
        """`Process.call` on all of `processes` at once."""
        return list(self._threads.map(lambda process: process.call(method, *arguments), processes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()
        self._threads.shutdown()


class Gathered:
    """Gathered on one rank and broadcast from there."""

    name = "gathered"

    def __init__(self, ranks: Ranks, bucket_bytes: int) -> None:
        self._ranks, self._bucket_bytes = ranks, bucket_bytes

    def open(self) -> None:
        """Connect."""
        threads = self._ranks._threads
        with reserve_port("127.0.0.1") as reserved:
            port = reserved.getsockname()[1]
            opened = [
                threads.submit(process.call, "gathered_open", port, number, self._bucket_bytes)
                for number, process in enumerate(self._ranks.all)
            ]
            for each in opened:
                each.result()

    def round(self) -> dict[str, float]:
        """Carry the weights once."""
        began = time.perf_counter()
        self._ranks.every(self._ranks.all, "gathered_round")
        latency_s = time.perf_counter() - began
        return {"latency_s": latency_s, "trainer_blocked_s": latency_s}

    def close(self) -> None:
        """Leave."""
        self._ranks.every(self._ranks.all, "gathered_close")


class _Replica:
    """The rollout ranks, as the coordinator knows them."""

    name = "rollout-0"

    def __init__(self, ranks: Ranks, integrity: str) -> None:
        self._ranks, self._integrity = ranks, integrity

    def subscriber_names(self) -> list[str]:
        return [f"{self.name}/{rank}" for rank in range(ROLLOUTS)]

    async def commit(self, version: int) -> CommitReport:
        began = time.perf_counter()
        await asyncio.to_thread(self._ranks.every, self._ranks.rollouts, "direct_commit", self._integrity, version)
        return CommitReport(version, time.perf_counter() - began)

    async def rollback(self, version: int) -> None:
        raise AssertionError(f"version {version} was not taken, and nothing is done twice here")

    async def quarantine(self, error: BaseException) -> None:
        raise error


class Direct:
    """From shard to shard."""

    def __init__(self, ranks: Ranks, bucket_bytes: int, integrity: str, timeout_s: float) -> None:
        self.name = "direct, checksummed" if integrity == "full" else "direct"
        self._ranks, self._integrity, self._timeout_s = ranks, integrity, timeout_s
        self._settings = (integrity, bucket_bytes, timeout_s)
        self._version = 0

    def open(self) -> None:
        """Connect."""
        self._opened = ExitStack()
        rendezvous = Rendezvous.host()
        self._ranks.every(self._ranks.all, "direct_open", rendezvous.address, *self._settings)
        config = SyncConfig(deadline_s=self._timeout_s, stall_s=self._timeout_s, retries=0, quorum=1.0)
        publishers = [process.name for process in self._ranks.trainers]
        self._coordinator = Coordinator(rendezvous, publishers, [_Replica(self._ranks, self._integrity)], config)
        self._opened.callback(self._coordinator.close)
        self._runner = self._opened.enter_context(asyncio.Runner())

    def round(self) -> dict[str, float]:
        """Carry the weights once."""
        self._version += 1
        began = time.perf_counter()
        self._ranks.every(self._ranks.trainers, "direct_publish", self._integrity, self._version)
        with ThreadPoolExecutor(1) as fence:
            passed = fence.submit(self._ranks.every, self._ranks.trainers, "direct_fence", self._integrity)
            report = self._runner.run(self._coordinator.sync(self._version))
            latency_s = time.perf_counter() - began
            blocked_s = max(passed.result())
        return {"latency_s": latency_s, "trainer_blocked_s": blocked_s, "sent_bytes": report.sent_bytes}

    def close(self) -> None:
        """Leave."""
        self._ranks.every(self._ranks.all, "direct_close", self._integrity)
        self._opened.close()


Way = Gathered | Direct


class Measurement:
    """Rounds, and what was wrong in them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._steps = 0
        self.wrong = 0
        """Tensors that had other bits than the trainers', over all rounds and ranks."""

    def round(self, way: Way) -> dict[str, float]:
        """Change every element, carry it, compare."""
        ranks = self._ranks
        ranks.every(ranks.trainers, "step")
        ranks.every(ranks.rollouts, "forget")
        self._steps += 1
        figures = way.round()
        self.wrong += sum(map(len, ranks.every(ranks.rollouts, "wrong", self._steps)))
        return figures

    def memory(self, way: Way) -> list[int]:
        """Bytes that each rank takes more at most while `way` alone is there."""
        self._ranks.every(self._ranks.all, "watch_memory")
        way.open()
        for _ in range(_WARM_UP):
            way.round()
        extra = self._ranks.every(self._ranks.all, "extra_memory")
        way.close()
        return extra

    def rounds(self, ways: Sequence[Way], count: int, say: Callable[[str], None]) -> dict[str, list[dict[str, float]]]:
        """Figures of `count` rounds of each way."""
        for way in ways:
            way.open()
        found: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
        for number in range(-_WARM_UP, count):
            turn = number % len(ways)
            for way in (*ways[turn:], *ways[:turn]):
                figures = self.round(way)
                say(f"round {number + 1 + _WARM_UP} of {_WARM_UP + count}: {way.name} {figures['latency_s']:.3f} s")
                if number >= 0:
                    found[way.name].append(figures)
        for way in ways:
            way.close()
        return found


def run(
    workload: Workload, *, rounds: int, bucket_bytes: int, timeout_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure all ways in turns; seconds, bytes of memory, and whether every bit was right."""
    with Ranks(workload, timeout_s) as ranks:
        ways: list[Way] = [
            Gathered(ranks, bucket_bytes),
            Direct(ranks, bucket_bytes, "off", timeout_s),
            Direct(ranks, bucket_bytes, "full", timeout_s),
        ]
        measured = Measurement(ranks)
        extra = {way.name: measured.memory(way) for way in ways}
        found = measured.rounds(ways, rounds, say)
        held = ranks.every(ranks.all, "held_bytes")
    rows = {name: _row(figures, extra[name]) for name, figures in found.items()}
    gathered = rows["gathered"]
    for row in rows.values():
        row["latency_of_gathered"] = row["latency_s"]["median"] / gathered["latency_s"]["median"]
        for side in ("trainer", "rollout"):
            most = f"extra_{side}_bytes"
            row[f"{side}_memory_of_gathered"] = max(row[most]) / max(gathered[most])
    return {
        "machine": this_machine().model_dump(),
        "date": datetime.now(UTC).date().isoformat(),
        "model": workload.name,
        "payload_bytes": workload.nbytes,
        "held_trainer_bytes": held[:TRAINERS],
        "held_rollout_bytes": held[TRAINERS:],
        "bucket_bytes": bucket_bytes,
        "rounds": rounds,
        "rows": rows,
        "sent_bytes": round(found["direct"][-1]["sent_bytes"]),
        "verified": measured.wrong == 0,
    }


def _row(figures: list[dict[str, float]], extra: list[int]) -> dict[str, Any]:
    return {
        "latency_s": _spread([each["latency_s"] for each in figures]),
        "trainer_blocked_s": _spread([each["trainer_blocked_s"] for each in figures]),
        "extra_trainer_bytes": extra[:TRAINERS],
        "extra_rollout_bytes": extra[TRAINERS:],
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def text(report: dict[str, Any]) -> str:
    """The report as a table."""

    def mb(nbytes: list[int]) -> str:
        return ", ".join(f"{each / 1e6:.0f}" for each in nbytes)

    lines = []
    lines.append(
        f"{report['model']}: {report['payload_bytes'] / 1e6:.1f} MB from {TRAINERS} trainer ranks to a replica of"
        f" {ROLLOUTS} ranks over gloo, buckets of {report['bucket_bytes'] / (1 << 20):g} MiB, {report['rounds']} rounds"
    )
    lines.append(
        f"weights held, MB: trainer ranks {mb(report['held_trainer_bytes'])}; rollout ranks"
        f" {mb(report['held_rollout_bytes'])}; sent direct: {report['sent_bytes'] / 1e6:.0f} MB"
    )
    lines.append(
        f"{'way':15} {'latency s':>10} {'least':>7} {'most':>7} {'of gathered':>12} {'trainer blocked s':>18}"
        f" {'extra MB trainer':>18} {'of gathered':>12} {'rollout':>12} {'of gathered':>12}"
    )
    for name, row in report["rows"].items():
        latency = row["latency_s"]
        lines.append(
            f"{name:15} {latency['median']:10.3f} {latency['min']:7.3f} {latency['max']:7.3f}"
            f" {row['latency_of_gathered']:12.2f} {row['trainer_blocked_s']['median']:18.3f}"
            f" {mb(row['extra_trainer_bytes']):>18} {row['trainer_memory_of_gathered']:12.2f}"
            f" {mb(row['extra_rollout_bytes']):>12} {row['rollout_memory_of_gathered']:12.2f}"
        )
    slowest = max(row["latency_of_gathered"] for name, row in report["rows"].items() if name != "gathered")
    lines.append(f"direct is never slower: {'met' if slowest <= 1 else 'MISSED'} ({slowest:.2f} of gathered)")
    if not report["verified"]:
        lines.append("NOT VERIFIED: rollout weights differ from the trainers'")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON if asked to; 1 if any bit was wrong, 2 where it cannot run here."""
    parser = options_of(__doc__, model="qwen3-0.6b", rounds=7, deadline_s=120.0)
    parser.add_argument("--bucket-mib", type=float, default=DEFAULT_BUCKET_MIB)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.bucket_mib <= 0:
        parser.error("--rounds and --bucket-mib must be positive")
    return finish(
        "direct",
        lambda: run(
            named_workload(options.model),
            rounds=options.rounds,
            bucket_bytes=SyncConfig(bucket_mib=options.bucket_mib).bucket_bytes,
            timeout_s=options.deadline_s,
            say=say,
        ),
        text,
        options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
