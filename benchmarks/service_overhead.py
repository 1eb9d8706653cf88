"""Measures what `weightlane tinker` adds to the steps of a client, beside a local program that trains by the same jobs.

    make demo                                    # makes the model
    python -m benchmarks.service_overhead

Both train one adapter of the demo's model, on one trainer rank in Ray, on the same batches, in turns of --steps steps: the client
by the public Tinker SDK, the local program by the `Runner` that the service uses, too. At the end, both adapters are compared bit
for bit. The SDK must be installed (``make setup`` does).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any

import torch
from safetensors.torch import load_file

from weightlane.cli.bench.report.machine import this_machine
from weightlane.cli.config.run_config import RaySection
from weightlane.cli.run.ray_cluster import RayCluster
from weightlane.trainer import (
    AdamParams,
    LoraConfig,
    LossDenominators,
    LossOutput,
    LossTerm,
    MicroBatch,
    ModelOutputs,
    TokenBatch,
    TokenSequence,
    TrainerConfig,
    needs,
)
from weightlane.trainer.algorithms.roles import POLICY
from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.dispatch.ray_ranks import RayRanks
from weightlane.trainer.dispatch.role_spec import RoleSpec
from weightlane.trainer.runner.jobs import CreateAdapter, ForwardBackward, OptimStep, SaveAdapter
from weightlane.trainer.runner.runner import Runner

from .command import Report, options_of
from .service import CALL_S, Service, equal_tensors, saved_tensors, with_service

RANK, ALPHA, RATE = 8, 32.0, 1e-3
TOKENS = 12
"""Tokens of a sequence, prompt and completion, as in the demo."""


@needs("logprobs")
def summed(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:  # noqa: ARG001 - every sequence has targets only
    """Minus the sum of all log-probabilities, which is the service's ``cross_entropy`` without weights."""
    return LossOutput({"loss": LossTerm(-outputs.required("logprobs").sum(), mean_over=1.0)})


def rows(step: int, batch: int) -> list[list[int]]:
    """The sequences of a step."""
    draws = random.Random(step)
    return [[draws.randrange(3, 13) for _ in range(TOKENS)] for _ in range(batch)]


def served_step(training: Any, sequences: list[list[int]]) -> None:
    """One step of the client."""
    from tinker import types

    data = [types.Datum(types.ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]}) for row in sequences]
    training.forward_backward(data, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=RATE, beta1=0.9, beta2=0.95, eps=1e-8)).result(CALL_S)


async def local_step(runner: Runner, sequences: list[list[int]]) -> None:
    """One step of the local program."""
    batch = TokenBatch(tuple(TokenSequence(torch.tensor(row[:-1]), torch.tensor(row[1:]), {}) for row in sequences))
    await runner.run(ForwardBackward(batch, summed, LossDenominators(1.0, 1.0), adapter="local"))
    adam = AdamParams(RATE, betas=(0.9, 0.95), eps=1e-8, max_grad_norm=float("inf"))
    await runner.run(OptimStep("local", adam))


async def measure(service: Service, args: Any) -> Report:
    """Take turns."""
    import tinker

    directory, model = service.files.parent, args.model.resolve()
    lora = LoraConfig(rank=RANK, alpha=ALPHA, publish="adapter", seed=7)
    config = TrainerConfig(device="cpu", frozen=True, lora=lora, niceness=10)
    seconds: dict[str, list[float]] = {"service": [], "local": []}
    async with AsyncExitStack() as stack:
        client = tinker.ServiceClient(base_url=service.url, api_key="tml-any")
        training = await asyncio.to_thread(
            lambda: client.create_lora_training_client(str(model), RANK, 7).result(CALL_S)
        )
        stack.enter_context(RayCluster(RaySection(), 1.0, directory / "logs", {}))
        dispatch = WorkerDispatch([RoleSpec(POLICY, config, model)], {"trainer": RayRanks(config, "127.0.0.1")})
        stack.push_async_callback(dispatch.close)
        await dispatch.start()
        runner = Runner(dispatch)
        stack.push_async_callback(runner.close)
        await runner.run(CreateAdapter("local", lora))
        for turn in range(args.rounds + 1):  # the first one does not count
            batches = [rows(turn * args.steps + number, args.batch) for number in range(args.steps)]
            began = time.perf_counter()
            for batch in batches:
                await asyncio.to_thread(served_step, training, batch)
            between = time.perf_counter()
            for batch in batches:
                await local_step(runner, batch)
            ended = time.perf_counter()
            if turn:
                seconds["service"].append((between - began) / args.steps)
                seconds["local"].append((ended - between) / args.steps)
        await runner.run(SaveAdapter("local", directory / "local"))
        served = await asyncio.to_thread(saved_tensors, service, training)
        same = equal_tensors(served, load_file(directory / "local" / "adapter_model.safetensors"))
    ratios = [one / other for one, other in zip(seconds["service"], seconds["local"], strict=True)]
    return {
        "machine": this_machine(),
        "batch": args.batch,
        "seconds": seconds,
        "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "verified": same,
    }


def text(report: Report) -> str:
    """The report as lines."""
    each = {name: statistics.median(found) * 1e3 for name, found in report["seconds"].items()}
    ratio = report["ratio"]
    return (
        f"{report['batch']} sequences a step: {each['service']:.1f} ms by the service, {each['local']:.1f} ms by the local"
        f" program: {ratio['median']:.2f} times ({ratio['least']:.2f} to {ratio['most']:.2f})\n"
        f"the weights are {'bit for bit the same' if report['verified'] else 'NOT the same'}"
    )


def main() -> None:
    """Measure."""
    parser = options_of(__doc__, rounds=5)
    parser.add_argument("--batch", type=int, default=256, help="sequences of a step: the demo has 256")
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    with_service("service_overhead", parser, lambda service, args: asyncio.run(measure(service, args)), text)


if __name__ == "__main__":
    main()
