"""Costs of versions for real vLLM while it decodes, next to those of a reload for which everything stops.

    python -m benchmarks.commit.versions                                        # the fixed cost: a model of the demo's size
    python -m benchmarks.commit.versions --layers 6 --requests 8 --between-s 0  # 256 MB, one version after the other

A replica decodes for --requests requests that follow one another. A trainer's process beside it only changes 1 % of the weights,
publishes them, and waits --between-s after every version. In every round each engine has its turn, and so has the *blocking*
method of a program that has only vLLM: pause it, write all weights to a file in memory, load them by vLLM's layerwise reload,
resume; trainer, rollout and latency lose the same time to it. Before each turn, tokens are counted for a while without versions,
and how long each request waits for its next one. The first version of a turn is not counted.

Without --layers the model has 0.6 M parameters, and nothing is limited by bytes. With --layers it has Qwen3-0.6B's width. --kv is
`rollout.kv_on_commit`: with *recompute*, the default of a run, requests in flight prefill again after every version; *keep* shows
the syncing alone. After every turn, outside the timing, the parameters in vLLM are compared with the trainer's bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import Report, finish, options_of, say, spread, table
from weightlane.cli.bench.processes.participants import start_coordinator, sync_config
from weightlane.cli.bench.processes.processes import Processes, Worker
from weightlane.cli.bench.workload.workload import named_workload
from weightlane.rollout import LocalReplica, RolloutConfig
from weightlane.sync import Coordinator, Outcome

BLOCKING = "blocking"
DENSITY = 0.01
ALONE_S = 5.0
"""Seconds without versions before each turn."""
_SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - a directory of its own is made there


class Checks:
    """Mixed into vLLM's worker by ``worker_extension_cls``."""

    def bench_differing(self, path: str) -> list[str]:
        """Parameters that are not what the safetensors file at `path` makes of them."""
        from safetensors.torch import load_file

        plan = self.weight_transfer_engine._rank.updatable.loader.plan  # type: ignore[attr-defined]
        if plan is None:
            raise RuntimeError("versions are not copied along a traced layout, so that there is nothing to compare by")
        parameters = dict(self.model_runner.get_model().named_parameters())  # type: ignore[attr-defined]
        before = {name: tensor.detach().clone().view(torch.uint8) for name, tensor in parameters.items()}
        plan.commit(load_file(path))
        return [name for name, tensor in parameters.items() if not torch.equal(tensor.view(torch.uint8), before[name])]

    def bench_reload(self, path: str) -> None:
        """Load a safetensors file through vLLM's own reload of a whole model."""
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config

        from weightlane.rollout.layout.loading.reload import load_version

        config = self.vllm_config  # type: ignore[attr-defined]
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        with set_current_vllm_config(config):
            load_version(model, config.model_config, load_file(path).items(), part="rank")


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of one version, in seconds: the trainer's and the rollout's blocked time, and the latency until it serves."""

    trainer_blocked_s: float
    rollout_blocked_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Decoding:
    """How vLLM decoded for a while: tokens per second, and the seconds that requests waited for each next token, sorted."""

    tokens_per_s: float
    gaps_s: Sequence[float]

    def gap_s(self, share: float) -> float:
        """The gap that so large a share of all gaps does not exceed."""
        return self.gaps_s[round(share * (len(self.gaps_s) - 1))]


@dataclass(frozen=True, slots=True)
class Turn:
    """Costs of each version of a turn, and how vLLM decoded before it and during it."""

    costs: Sequence[Cost]
    alone: Decoding
    meanwhile: Decoding
    recomputed_tokens: float
    """Tokens per version that requests in flight prefilled again."""


class Measured:
    """A replica that decodes, and a trainer's process that publishes to it over one engine at a time."""

    def __init__(self, worker: LocalReplica, sender: Worker, directory: Path, options: argparse.Namespace) -> None:
        self._worker, self._sender, self._directory, self._options = worker, sender, directory, options
        self._versions, self._rows = itertools.count(1), itertools.count()
        self._gaps_s: list[float] = []
        self._watch_tokens()
        self._left: Callable[[], Any] | None = None
        """Ends the connection measured last: when the replica has gone over to the next, or is gone itself."""

    def _watch_tokens(self) -> None:
        """Note how long every request waits for each next token."""
        clock, last_s = self._worker.clock, dict[str, float]()
        arrived = clock.arrived

        def watched(request_id: str, tokens: int) -> None:
            arrived(request_id, tokens)
            now = time.monotonic()
            if (before := last_s.get(request_id)) is not None:
                self._gaps_s.append(now - before)
            last_s[request_id] = now

        clock.arrived = watched  # type: ignore[method-assign]

    @contextlib.asynccontextmanager
    async def decoding(self) -> AsyncIterator[None]:
        """Keep so many requests in flight."""
        count, tokens = self._options.requests, self._options.tokens
        firsts = [tokens - number * tokens // count for number in range(count)]  # so that requests end in any step
        tasks = [asyncio.create_task(self._requests(number, first)) for number, first in enumerate(firsts)]
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
            prompt = [1 + (number * 31 + turn * 7 + position) % 1000 for position in range(self._options.prompt)]
            await self._worker.generate(f"{number}-{turn}", prompt, self._options.tokens if turn else first_tokens)

    async def turn(self, method: str) -> Turn:
        """Count tokens without versions, then carry versions by `method`, one after the other."""
        alone = await self._decoded(asyncio.sleep(ALONE_S))
        carry = self.block if method == BLOCKING else await self.connected(method)
        await carry()  # not counted
        costs: list[Cost] = []

        async def versions() -> None:
            for _ in range(self._options.versions):
                costs.append(await carry())
                await asyncio.sleep(self._options.between_s)

        before = self._worker.stats().recomputed_tokens
        meanwhile = await self._decoded(versions())
        return Turn(costs, alone, meanwhile, (self._worker.stats().recomputed_tokens - before) / len(costs))

    async def _decoded(self, meanwhile: Awaitable[None]) -> Decoding:
        before, began = self._worker.stats().tokens, time.monotonic()
        self._gaps_s.clear()
        await meanwhile
        per_s = (self._worker.stats().tokens - before) / (time.monotonic() - began)
        return Decoding(per_s, sorted(self._gaps_s))

    async def connected(self, engine: str) -> Callable[[], Awaitable[Cost]]:
        """Connect the trainer's process to the replica by `engine`, in the place of what was before.

        Returns what carries a version.
        """
        config = sync_config(codec="dense", integrity="full", bucket_mib=None, deadline_s=self._options.deadline_s)
        # A directory of its own each time: a new publisher begins with an empty store.
        options = {"path": tempfile.mkdtemp(dir=self._directory)} if engine == "filesystem" else {}
        coordinator, address = start_coordinator(config, [self._worker])
        row = f"{engine} {next(self._rows)}"
        await self._call("open_row", row, address, engine, options, config.model_dump(mode="json"))
        await self._call("peak_bytes", row)
        await self._worker.connect(address, engine, options)
        await self.leave()

        async def leave() -> None:
            await self._call("close_row", row)
            coordinator.close()

        self._left = leave
        return lambda: self._carry(row, coordinator)

    async def leave(self) -> None:
        """End the connection measured last."""
        left, self._left = self._left, None
        if left is not None:
            await left()

    async def _carry(self, row: str, coordinator: Coordinator) -> Cost:
        """Change the weights, and bring their next version into service."""
        version = next(self._versions)
        await self._call("change", DENSITY)
        publishing = asyncio.create_task(self._call("publish", row, version, 0.0))
        report = await coordinator.sync(version)
        took = await publishing
        if any(replica.outcome is not Outcome.COMMITTED for replica in report.replicas.values()):
            raise RuntimeError(f"version {version} was not committed: {report}")
        return Cost(took["publish_s"] + took["fence_s"], report.rollout_blocked_s, report.latency_s)

    async def block(self) -> Cost:
        """Change the weights, and have everything wait until vLLM has loaded them."""
        await self._call("change", DENSITY)
        path = str(self._directory / "version.safetensors")
        engine = self._worker._engine.running
        began = time.monotonic()
        await engine.pause_generation(mode="keep", clear_cache=True)
        await self._call("save", path)
        await engine.collective_rpc("bench_reload", args=(path,))
        await engine.resume_generation()
        took = time.monotonic() - began
        return Cost(took, took, took)

    async def differing(self) -> list[str]:
        """Parameters in vLLM that are not the trainer's."""
        path = str(self._directory / "now.safetensors")
        await self._call("save", path)
        found: list[list[str]] = await self._worker._engine.running.collective_rpc("bench_differing", args=(path,))
        return [name for rank in found for name in rank]

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(self._sender.call, method, *arguments, timeout_s=self._options.deadline_s)


def write_model(directory: Path, layers: int) -> None:
    """A checkpoint with random weights: of Qwen3-0.6B's width with so many layers, or of the demo's size for 0."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 32, "dtype": "float32",
    } if not layers else {
        "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16",
    }  # fmt: skip
    config = transformers.Qwen3Config(tie_word_embeddings=True, **sizes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype).save_pretrained(directory)


async def take_turns(measured: Measured, options: argparse.Namespace) -> tuple[dict[str, list[Turn]], bool]:
    """The turns of each method, and whether every bit was right after each."""
    methods = [*options.engine, BLOCKING]
    found: dict[str, list[Turn]] = {method: [] for method in methods}
    verified = True
    for number in range(options.rounds):
        for method in methods if number % 2 == 0 else reversed(methods):
            say(f"round {number + 1} of {options.rounds}: {method}")
            found[method].append(await measured.turn(method))
            if differing := await measured.differing():
                say(f"other bits than the trainer's: {', '.join(differing)}")
                verified = False
    return found, verified


async def measure(model: Path, options: argparse.Namespace) -> tuple[dict[str, list[Turn]], bool]:
    """Start vLLM and the trainer's process, and take turns."""
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of vLLM's processes; a replica sets only what is not set yet
    config = RolloutConfig(
        dtype="bfloat16" if options.layers else "float32",
        max_model_len=256,
        max_num_seqs=options.requests,
        threads_per_rank=options.threads,
        kv_cache_memory_bytes=(512 if options.layers else 64) << 20,
        kv_on_commit=options.kv,
        extra_engine_args={"worker_extension_cls": "benchmarks.commit.versions.Checks"},
    )
    worker = LocalReplica("rollout-0", config, model)
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY) as directory, Processes(0, 1) as processes:
        call, workload = processes.sender.call, named_workload(str(model))
        await asyncio.to_thread(call, "prepare", workload.to_plain(), 0, 1, timeout_s=options.deadline_s)
        await asyncio.to_thread(call, "load", str(model / "model.safetensors"), 0.0, timeout_s=options.deadline_s)
        measured = Measured(worker, processes.sender, Path(directory), options)
        say(f"vLLM starts on {options.threads} thread(s)")
        await worker.start()
        try:
            await worker.generate("first", [1] * options.prompt, 8)  # vLLM's first steps compile what they need
            async with measured.decoding():
                return await take_turns(measured, options)
        finally:
            await worker.close()
            await measured.leave()


def row_of(method: str, turns: Sequence[Turn]) -> dict[str, Any]:
    """A method's figures: median and 95th percentile of each cost in seconds, and how vLLM decoded before and meanwhile."""
    costs = [cost for turn in turns for cost in turn.costs]
    row: dict[str, Any] = {"method": method, "versions": len(costs)}
    for name in ("trainer_blocked_s", "rollout_blocked_s", "latency_s"):
        seconds = sorted(getattr(cost, name) for cost in costs)
        row[name] = {**spread(seconds), "p95": seconds[round(0.95 * (len(seconds) - 1))]}
    row["alone_tokens_per_s"] = spread(turn.alone.tokens_per_s for turn in turns)
    row["share"] = spread(turn.meanwhile.tokens_per_s / turn.alone.tokens_per_s for turn in turns)
    if method != BLOCKING:  # a commit counts them, vLLM's own pause does not
        row["recomputed_tokens"] = spread(turn.recomputed_tokens for turn in turns)
    for name, share in (("median", 0.5), ("p99", 0.99), ("max", 1.0)):
        row[f"gap_{name}_s"] = {
            "alone": spread(turn.alone.gap_s(share) for turn in turns),
            "meanwhile": spread(turn.meanwhile.gap_s(share) for turn in turns),
        }
    return row


def text(report: Report) -> str:
    """The table, below a line about the setting."""
    rows = []
    for row in report["rows"]:
        costs = [row[name] for name in ("trainer_blocked_s", "rollout_blocked_s", "latency_s")]
        times = [f"{1e3 * cost['median']:.1f} ({1e3 * cost['p95']:.1f})" for cost in costs]
        share = "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["share"]) if "share" in row else ""
        gaps = [
            " / ".join(f"{1e3 * row[f'gap_{name}_s'][when]['median']:.0f}" for name in ("median", "p99", "max"))
            if "gap_max_s" in row
            else ""
            for when in ("alone", "meanwhile")
        ]
        again = f"{row['recomputed_tokens']['median']:.0f}" if "recomputed_tokens" in row else ""
        rows.append([row["method"], row["versions"], *times, share, *gaps, again])
    about = (
        f"{report['payload_bytes'] / 1e6:.1f} MB, {report['requests']} requests in flight, caches:"
        f" {report.get('kv', 'recompute')}; milliseconds, median (p95), next token: median / p99 / longest:"
    )
    columns = (
        "method", "versions", "trainer blocked", "rollout blocked", "latency", "tokens/s, share of those before",
        "next token before", "next token meanwhile", "tokens prefilled again per version",
    )  # fmt: skip
    return f"{about}\n\n{table(columns, rows)}"


def run(options: argparse.Namespace) -> Report:
    """Measure everything that was asked for."""
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), options.layers)
        payload_bytes = named_workload(directory).nbytes
        found, verified = asyncio.run(measure(Path(directory), options))
    settings = {name: getattr(options, name) for name in ("requests", "kv", "threads", "between_s", "rounds")}
    rows = [row_of(method, turns) for method, turns in found.items()]
    return {**settings, "payload_bytes": payload_bytes, "rows": rows, "verified": verified}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON if asked to; 1 if any bit was wrong, 2 where it cannot run here."""
    parser = options_of(__doc__, rounds=4, deadline_s=120.0)
    parser.add_argument("--engine", action="append", help="of shm, gloo, filesystem; repeatable; shm by default")
    parser.add_argument("--layers", type=int, default=0, help="of 31.5 MB each, beside an embedding of 67 MB")
    parser.add_argument("--requests", type=int, default=64, help="in flight")
    parser.add_argument("--versions", type=int, default=20, help="in each turn")
    parser.add_argument("--between-s", type=float, default=0.1, help="how long the trainer rests after a version")
    parser.add_argument("--threads", type=int, default=1, help="of vLLM")
    parser.add_argument("--kv", choices=["keep", "recompute"], default="recompute")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.versions, options.requests, options.threads) < 1 or options.between_s < 0:
        parser.error("--rounds, --versions, --requests and --threads must be positive, --between-s not negative")
    options.engine = options.engine or ["shm"]
    options.prompt, options.tokens = (16, 112) if options.layers else (7, 6)  # as in the arithmetic demo
    return finish("versions", lambda: run(options), text, options.json)


if __name__ == "__main__":
    sys.exit(main())
