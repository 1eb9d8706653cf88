"""How many tokens per second real vLLM decodes while versions of its model arrive without a break, against undisturbed.

    python -m benchmarks.decode_while_syncing --engine shm,gloo --threads 1,2 --json decode_while_syncing.json

A model of Qwen3-0.6B's width, cut to some layers, decodes for --concurrency requests that follow one another. A trainer's process
beside it changes 1 % of the weights, publishes, and does it again as soon as the version is in service: no pause between
versions, which is far more than any training asks for. In every round each way of syncing has its turn, and before it a turn
without any; a figure is the median over the rounds of the one over the other. Every turn begins with a version that is not
counted.

--threads 1 leaves a core of two to the trainer's process; with 2 vLLM computes on both, and syncing takes from it whatever it
costs. --kv is `rollout.kv_on_commit`: with *recompute* every request in flight prefills again after every version, which is what
costs most where versions come so often; *keep* shows the syncing alone.

After the last round, outside the timing, the parameters in vLLM are compared with the trainer's bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import DeadlineExceededError
from weightlane.cli.bench.processes.participants import CoordinatingSide, sync_config
from weightlane.cli.bench.processes.processes import Processes, Worker
from weightlane.cli.bench.report.machine import this_machine
from weightlane.cli.bench.workload.workload import Workload, named_workload
from weightlane.rollout import LocalReplica, RolloutConfig
from weightlane.sync import Outcome

from .command import finish, options_of, say
from .commit_layout import write_config

KV = ("keep", "recompute")
DENSITY = 0.01
PROMPT_TOKENS, NEW_TOKENS = 16, 112
_BETWEEN_S = 0.2


class Checks:
    """Mixed into vLLM's worker by ``worker_extension_cls``."""

    def bench_differing(self, path: str) -> list[str]:
        """Parameters that are not what the safetensors file at `path` makes of them."""
        from safetensors.torch import load_file

        plan = self.weight_transfer_engine._weights.loader.plan  # type: ignore[attr-defined]
        if plan is None:
            raise RuntimeError("versions are not copied along a traced layout, so that there is nothing to compare by")
        parameters = dict(self.model_runner.get_model().named_parameters())  # type: ignore[attr-defined]
        before = {name: tensor.detach().clone().view(torch.uint8) for name, tensor in parameters.items()}
        plan.commit(load_file(path))
        return [name for name, tensor in parameters.items() if not torch.equal(tensor.view(torch.uint8), before[name])]


@dataclass(frozen=True, slots=True)
class Turn:
    """Measurements of one turn: decoded tokens per second, committed versions, and how long decoding was blocked."""

    tokens_per_s: float
    versions: int
    blocked_s: float
    """Seconds that all commits of the turn together blocked the rollout."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Carried:
    """Costs of one version, in seconds: the trainer's and the rollout's blocked time, and the latency."""

    trainer_blocked_s: float
    rollout_blocked_s: float
    latency_s: float
    """From `publish` until it served."""


@dataclass(slots=True)
class Way:
    """One engine and one setting of ``rollout.kv_on_commit``, and its turns, each behind one without versions."""

    engine: str
    kv: str
    pairs: list[tuple[Turn, Turn]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """The way's row."""
        alone, beside = zip(*self.pairs, strict=True)
        versions = sum(turn.versions for turn in beside)
        return {
            "engine": self.engine,
            "kv_on_commit": self.kv,
            "alone_tokens_per_s": _spread([turn.tokens_per_s for turn in alone]),
            "tokens_per_s": _spread([turn.tokens_per_s for turn in beside]),
            "share": _spread([after.tokens_per_s / before.tokens_per_s for before, after in self.pairs]),
            "versions": versions,
            "versions_per_s": versions / sum(turn.seconds for turn in beside),
            "blocked_s_per_version": sum(turn.blocked_s for turn in beside) / max(1, versions),
        }


class Measured:
    """A replica that decodes, and a trainer's process that publishes to it over one engine at a time."""

    def __init__(
        self,
        worker: LocalReplica,
        sender: Worker,
        directory: Path,
        timeout_s: float,
        tokens: tuple[int, int] = (PROMPT_TOKENS, NEW_TOKENS),
    ) -> None:
        self._worker = worker
        self._prompt_tokens, self._new_tokens = tokens
        self._sender = sender
        self._directory = directory
        self._timeout_s = timeout_s
        self._versions = itertools.count(1)
        self._rows = itertools.count()
        self._left: Callable[[], Any] | None = None
        """Ends the way measured last: when the replica has gone over to the next, or is gone itself."""

    @contextlib.asynccontextmanager
    async def decoding(self, concurrency: int) -> AsyncIterator[None]:
        """So many requests are in flight all the time."""
        lengths = [first_length(number, concurrency, self._new_tokens) for number in range(concurrency)]
        tasks = [asyncio.create_task(self._requests(number, first)) for number, first in enumerate(lengths)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if not isinstance(error, asyncio.CancelledError):
                raise error if isinstance(error, BaseException) else RuntimeError("requests came to an end")

    async def _requests(self, number: int, first_tokens: int) -> None:
        """One request after the other, the first of `first_tokens` tokens."""
        for turn in itertools.count():
            prompt = [1 + (number * 31 + turn * 7 + position) % 1000 for position in range(self._prompt_tokens)]
            await self._worker.generate(f"{number}-{turn}", prompt, self._new_tokens if turn else first_tokens)

    async def warm_up(self) -> None:
        """One request from beginning to end: vLLM's first steps compile what they need."""
        await self._worker.generate("first", [1] * self._prompt_tokens, 8)

    async def alone(self, seconds: float) -> Turn:
        """A turn without versions, longer where no token comes for so long; `DeadlineExceededError` when none comes at all."""

        async def some_tokens() -> None:
            before, until = self._worker.clock.tokens, time.monotonic() + self._timeout_s
            await asyncio.sleep(seconds)
            while self._worker.clock.tokens == before:
                if time.monotonic() > until:
                    raise DeadlineExceededError(
                        f"no token was decoded within {self._timeout_s:.0f} s.", part="decoding"
                    )
                await asyncio.sleep(_BETWEEN_S)

        return await self._turn(some_tokens)

    async def beside(self, way: Way, seconds: float) -> Turn:
        """A turn with one version after the other."""
        self._worker.config = self._worker.config.model_copy(update={"kv_on_commit": way.kv})
        carry = await self.connected(way.engine)
        await carry()

        async def one_after_the_other() -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await carry()

        return await self._turn(one_after_the_other)

    async def connected(self, engine: str) -> Callable[[], Awaitable[Carried]]:
        """Connect the trainer's process to the replica by `engine`, in the place of what was before.

        Returns what carries a version.
        """
        config = sync_config(codec="dense", integrity="full", bucket_mib=None, deadline_s=self._timeout_s)
        # A directory of its own each time: a new publisher begins with an empty store.
        options = {"path": tempfile.mkdtemp(dir=self._directory)} if engine == "filesystem" else {}
        meeting, row = CoordinatingSide(config, [self._worker]), f"{engine} {next(self._rows)}"
        await self._call("open_row", row, meeting.address, engine, options, config.model_dump(mode="json"))
        await self._call("peak_bytes", row)
        await self._worker.connect(meeting.address, engine, options)
        await self.leave()

        async def leave() -> None:
            await self._call("close_row", row)
            meeting.close()

        self._left = leave
        return lambda: self._carry(row, meeting)

    async def leave(self) -> None:
        """End what carried versions last."""
        left, self._left = self._left, None
        if left is not None:
            await left()

    async def _turn(self, meanwhile: Callable[[], Any]) -> Turn:
        await asyncio.sleep(_BETWEEN_S)
        before, began = self._worker.stats(), time.monotonic()
        await meanwhile()
        after, seconds = self._worker.stats(), time.monotonic() - began
        return Turn(
            (after.tokens - before.tokens) / seconds,
            after.commits - before.commits,
            after.blocked_s - before.blocked_s,
            seconds,
        )

    async def _carry(self, row: str, meeting: CoordinatingSide) -> Carried:
        """The weights change, and the next version of them goes into service."""
        version = next(self._versions)
        await self._call("change", DENSITY)
        publishing = asyncio.create_task(self._call("publish", row, version, 0.0))
        report = await meeting.sync(version)
        took = await publishing
        if any(replica.outcome is not Outcome.COMMITTED for replica in report.replicas.values()):
            raise RuntimeError(f"version {version} was not committed: {report}")
        return Carried(took["publish_s"] + took["fence_s"], report.rollout_blocked_s, report.latency_s)

    async def differing(self) -> list[str]:
        """Parameters in vLLM that are not the trainer's."""
        path = str(self._directory / "now.safetensors")
        await self._call("save", path)
        found: list[list[str]] = await self._worker._engine.running.collective_rpc("bench_differing", args=(path,))
        return [name for rank in found for name in rank]

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(self._sender.call, method, *arguments, timeout_s=self._timeout_s)


def first_length(number: int, concurrency: int, new_tokens: int) -> int:
    """Tokens of the first request of series `number` of `concurrency`: spread evenly, so that requests end in any step."""
    return new_tokens - number * new_tokens // concurrency


def write_model(directory: Path, layers: int) -> Workload:
    """A checkpoint with random weights."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16)
        for name, shape in write_config(directory, layers)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return named_workload(str(directory))


async def measure(
    model: Path, workload: Workload, ways: Sequence[Way], options: argparse.Namespace, threads: int
) -> tuple[list[dict[str, Any]], bool]:
    """The rows of one number of threads, and whether every bit was right in the end."""
    # What vLLM's processes get; a replica sets only what is not set yet.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    config = RolloutConfig(
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=options.concurrency,
        threads_per_rank=threads,
        extra_engine_args={"worker_extension_cls": f"{_MODULE}.Checks"},
    )
    worker = LocalReplica("rollout-0", config, model)
    with tempfile.TemporaryDirectory() as directory, Processes(0, 1) as processes:
        sender = processes.sender
        await asyncio.to_thread(sender.call, "prepare", workload.to_plain(), 0, 1, timeout_s=options.deadline_s)
        file = str(model / "model.safetensors")
        await asyncio.to_thread(sender.call, "load", file, 0.0, timeout_s=options.deadline_s)
        measured = Measured(worker, sender, Path(directory), options.deadline_s)
        say(f"vLLM on {threads} thread(s) starts")
        await worker.start()
        try:
            await measured.warm_up()
            async with measured.decoding(options.concurrency):
                await measured.alone(options.turn_s)
                for number in range(options.rounds):
                    for way in ways if number % 2 == 0 else reversed(ways):
                        pair = await measured.alone(options.turn_s), await measured.beside(way, options.turn_s)
                        say(
                            f"round {number + 1} of {options.rounds}: {way.engine}, kv {way.kv}:"
                            f" {pair[1].tokens_per_s:.0f} of {pair[0].tokens_per_s:.0f} tokens/s, {pair[1].versions} versions"
                        )
                        way.pairs.append(pair)
            differing = await measured.differing()
        finally:
            await worker.close()
            await measured.leave()
    return [{"threads": threads, **way.figures()} for way in ways], not differing


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that was asked for."""
    rows, verified = [], True
    with tempfile.TemporaryDirectory() as directory:
        workload = write_model(Path(directory), options.layers)
        for threads in options.threads:
            ways = [Way(engine, kv) for engine in options.engine for kv in options.kv]
            found, equal = asyncio.run(measure(Path(directory), workload, ways, options, threads))
            rows += found
            verified = verified and equal
    return {
        "benchmark": "decode_while_syncing",
        "machine": this_machine().model_dump(),
        "date": datetime.now(UTC).date().isoformat(),
        "payload_bytes": workload.nbytes,
        "tensors": len(workload.specs),
        "concurrency": options.concurrency,
        "integrity": "full",
        "rounds": options.rounds,
        "turn_s": options.turn_s,
        "rows": rows,
        "verified": verified,
    }


def text(report: dict[str, Any]) -> str:
    """The report as a table."""
    setup = (
        f"{report['payload_bytes'] / 1e6:.0f} MB of bfloat16 in {report['tensors']} tensors, {report['concurrency']} requests in"
        f" flight, {report['machine']['cores']} cores; medians of {report['rounds']} rounds"
    )
    head = (
        f"{'threads':>7} {'engine':11} {'kv':10} {'alone tok/s':>12} {'syncing':>9} {'share':>7} {'min':>6} {'max':>6}"
        f" {'versions/s':>11} {'commit ms':>10}"
    )
    lines = [setup, head]
    for row in report["rows"]:
        share = row["share"]
        lines.append(
            f"{row['threads']:7} {row['engine']:11} {row['kv_on_commit']:10} {row['alone_tokens_per_s']['median']:12.0f}"
            f" {row['tokens_per_s']['median']:9.0f} {share['median']:7.2f} {share['min']:6.2f} {share['max']:6.2f}"
            f" {row['versions_per_s']:11.2f} {1e3 * row['blocked_s_per_version']:10.1f}"
        )
    if not report["verified"]:
        lines.append("NOT VERIFIED: parameters in vLLM are not the trainer's")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


_MODULE = "benchmarks.decode_while_syncing"
"""Name under which vLLM's processes import this module; ``__name__`` is ``__main__`` when it runs as a command."""


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON if asked to; 1 if any bit was wrong, 2 where it cannot run here."""
    parser = options_of(__doc__, rounds=3, deadline_s=120.0)
    parser.add_argument("--engine", type=_words, default=["shm", "gloo"], help="of shm, gloo, filesystem")
    parser.add_argument("--kv", type=_words, default=list(KV), help="of keep, recompute")
    parser.add_argument("--threads", type=_numbers, default=[1, 2], help="of torch in vLLM")
    parser.add_argument("--layers", type=int, default=6, help="of 31.5 MB each, beside an embedding of 67 MB")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight")
    parser.add_argument("--turn-s", type=float, default=5.0)
    options = parser.parse_args(arguments)
    if min(options.rounds, options.layers, options.concurrency, *options.threads) < 1 or set(options.kv) - set(KV):
        parser.error("--rounds, --layers, --concurrency and --threads must be positive, --kv of keep and recompute")
    return finish("decode_while_syncing", lambda: run(options), text, options.json)


def _words(given: str) -> list[str]:
    return given.split(",")


def _numbers(given: str) -> list[int]:
    return [int(number) for number in given.split(",")]


if __name__ == "__main__":
    sys.exit(main())
