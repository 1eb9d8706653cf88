"""Measures how much one small version costs real vLLM and an idle trainer, beside the blocking way.

    python -m benchmarks.version_cost --json version_cost.json

A replica of the demo's size (0.6 M parameters) decodes for --concurrency requests of a few tokens that follow one another. A
trainer's process beside it does nothing but change 1 % of the weights and publish them, and waits for --between-s after every
version. Nothing here is limited by bytes: what is measured is a version's fixed cost, without anybody who trains on the same
cores. In every round each engine has its turn, and so has the blocking way, in changing order; the first version of a turn is not
counted.

The blocking way is what a program does that has only vLLM: pause it, so that both sides stand still; write all weights to a
file in memory; have vLLM load them through its own layerwise reload; resume. Trainer, rollout and latency lose the same time
to it.

After every turn, outside the timing, the parameters in vLLM are compared with the trainer's bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weightlane.cli.bench.processes.processes import Processes
from weightlane.cli.bench.report.machine import this_machine
from weightlane.cli.bench.workload.workload import named_workload
from weightlane.rollout import LocalReplica, RolloutConfig

from .command import finish, options_of, say
from .decode_while_syncing import DENSITY, Carried, Checks, Measured

BLOCKING = "blocking way"
PROMPT_TOKENS, NEW_TOKENS = 7, 6
"""Tokens of a prompt and of its completion, as many as in the arithmetic demo."""
_SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - a directory of its own is made there


class Reloads(Checks):
    """Mixed into vLLM's worker by ``worker_extension_cls``."""

    def bench_reload(self, path: str) -> None:
        """Load a safetensors file through vLLM's own reload of a whole model."""
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config

        from weightlane.rollout.layout.loading.reload import load_version

        config = self.vllm_config  # type: ignore[attr-defined]
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        with set_current_vllm_config(config):
            load_version(model, config.model_config, load_file(path).items(), part="rank")


class Versions(Measured):
    """Carries versions to a replica that decodes, by weightlane or the blocking way."""

    async def block(self) -> Carried:
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
        return Carried(took, took, took)


def write_tiny_model(directory: Path) -> None:
    """A checkpoint of the demo's shape, with random weights."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        dtype="float32",
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)


async def measure(model: Path, options: argparse.Namespace) -> tuple[dict[str, list[Carried]], bool]:
    """Costs of every version, by way, and whether every bit was right after every turn."""
    workload = named_workload(str(model))
    config = RolloutConfig(
        dtype="float32",
        max_model_len=64,
        max_num_seqs=options.concurrency,
        kv_cache_memory_bytes=64 << 20,
        extra_engine_args={"worker_extension_cls": "benchmarks.version_cost.Reloads"},
    )
    worker = LocalReplica("rollout-0", config, model)
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY) as directory, Processes(0, 1) as processes:
        call = processes.sender.call
        await asyncio.to_thread(call, "prepare", workload.to_plain(), 0, 1, timeout_s=options.deadline_s)
        await asyncio.to_thread(call, "load", str(model / "model.safetensors"), 0.0, timeout_s=options.deadline_s)
        measured = Versions(worker, processes.sender, Path(directory), options.deadline_s, (PROMPT_TOKENS, NEW_TOKENS))
        say("vLLM starts")
        await worker.start()
        try:
            await measured.warm_up()
            async with measured.decoding(options.concurrency):
                return await carry_in_turns(measured, options)
        finally:
            await worker.close()
            await measured.leave()


async def carry_in_turns(measured: Versions, options: argparse.Namespace) -> tuple[dict[str, list[Carried]], bool]:
    """Give every way its turn in each round. Returns as `measure` does."""
    found: dict[str, list[Carried]] = {way: [] for way in (*options.engine, BLOCKING)}
    verified = True
    for number in range(options.rounds):
        for way in list(found) if number % 2 == 0 else list(reversed(found)):
            say(f"round {number + 1} of {options.rounds}: {way}")
            carry = measured.block if way == BLOCKING else await measured.connected(way)
            found[way] += await _turn(carry, options.versions, options.between_s)
            if differing := await measured.differing():
                say(f"other bits than the trainer's: {', '.join(differing)}")
                verified = False
    return found, verified


async def _turn(carry: Callable[[], Awaitable[Carried]], versions: int, between_s: float) -> list[Carried]:
    carried = []
    for _ in range(versions + 1):
        carried.append(await carry())
        await asyncio.sleep(between_s)
    return carried[1:]


def figures(way: str, carried: Sequence[Carried]) -> dict[str, Any]:
    """The row of a way: median and 95th percentile of each cost, in seconds."""
    costs = [asdict(each) for each in carried]
    row: dict[str, Any] = {"way": way, "versions": len(costs)}
    for cost in costs[0]:
        seconds = sorted(each[cost] for each in costs)
        row[cost] = {"median": statistics.median(seconds), "p95": seconds[round(0.95 * (len(seconds) - 1))]}
    return row


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that was asked for."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(options.model or directory)
        if not options.model:
            write_tiny_model(model)
        found, verified = asyncio.run(measure(model, options))
        payload_bytes = named_workload(str(model)).nbytes
    return {
        "benchmark": "version_cost",
        "machine": this_machine().model_dump(),
        "date": datetime.now(UTC).date().isoformat(),
        "payload_bytes": payload_bytes,
        "concurrency": options.concurrency,
        "between_s": options.between_s,
        "rounds": options.rounds,
        "rows": [figures(way, carried) for way, carried in found.items()],
        "verified": verified,
    }


def text(report: dict[str, Any]) -> str:
    """The report as a table."""
    about = f"{report['payload_bytes'] / 1e6:.1f} MB, {report['concurrency']} requests in flight, an idle trainer"
    lines = [
        f"{about}, {report['machine']['cores']} cores; ms per version, median and p95",
        f"{'way':13} {'versions':>8} {'trainer blocked':>18} {'rollout blocked':>18} {'latency':>18}",
    ]
    for row in report["rows"]:
        costs = [row[cost] for cost in ("trainer_blocked_s", "rollout_blocked_s", "latency_s")]
        shown = " ".join(f"{1e3 * cost['median']:9.1f} {1e3 * cost['p95']:8.1f}" for cost in costs)
        lines.append(f"{row['way']:13} {row['versions']:8} {shown}")
    if not report["verified"]:
        lines.append("NOT VERIFIED: parameters in vLLM are not the trainer's")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON if asked to; 1 if any bit was wrong, 2 where it cannot run here."""
    parser = options_of(__doc__, rounds=4, deadline_s=60.0)
    parser.add_argument(
        "--engine", type=lambda given: given.split(","), default=["shm"], help="of shm, gloo, filesystem"
    )
    parser.add_argument("--model", default="", help="a directory with a checkpoint in one float32 safetensors file")
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight")
    parser.add_argument("--versions", type=int, default=20, help="in each turn")
    parser.add_argument("--between-s", type=float, default=0.1, help="how long the trainer rests after a version")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.versions, options.concurrency) < 1 or options.between_s < 0:
        parser.error("--rounds, --versions and --concurrency must be positive, --between-s not negative")
    return finish("version_cost", lambda: run(options), text, options.json)


if __name__ == "__main__":
    sys.exit(main())
