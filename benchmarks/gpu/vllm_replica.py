"""Carries versions of real models into vLLM on GPUs, with CUDA graphs, and looks at what it generates.

    python -m benchmarks.gpu.vllm_replica [--tp 1] [--engine cuda_ipc] [--json FILE] MODEL...

MODEL is a directory with safetensors files, as a Hugging Face cache has them. For each: a replica starts with the model's own
weights and answers some prompts; it gets the same weights as a version, then others (every matrix a little smaller), then the
first again. Its answers must be the same, others, and the same. The trainer, in this process, has the weights on GPU 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from weightlane.rollout import LocalReplica, RolloutConfig
from weightlane.rollout.conformance.publishing import OneRankTrainer

from .models import name_of

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time", "2 + 2 =")
TOKENS = 24
_DEADLINE_S = 120.0
_SHARE_OF_GPU = 0.5
"""Share of GPU memory that vLLM takes; the trainer's weights and its versions are in the rest (`models.SHARE_OF_MEMORY`)."""
_SMALLER = 0.9


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    """The model's tensors on GPU 0, or on the CPU where there is none."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt", device="cuda:0" if torch.cuda.is_available() else "cpu") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dict
    return found


async def measure(model: Path, ranks: int, engine: str) -> dict[str, Any]:
    """Figures of one model. Raises RuntimeError when the replica says what it should not."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = RolloutConfig(tensor_parallel=ranks, gpu_memory_utilization=_SHARE_OF_GPU)
    replica = LocalReplica("rollout-0", config, model)
    trainer: OneRankTrainer | None = None

    async def answers() -> list[list[int]]:
        """Completions of `PROMPTS`, decoded greedily one after the other."""
        said = [await replica.generate("prompt", tokenizer.encode(each), TOKENS, greedy=True) for each in PROMPTS]
        return [completion.token_ids for completion in said]

    try:
        await replica.start()
        said, weights = [await answers()], weights_of(model)
        trainer = OneRankTrainer(weights, engine, {}, bucket_mib=32.0)
        await replica.connect(trainer.address, engine)
        await trainer.connect([replica], _DEADLINE_S)
        for factor in (1.0, _SMALLER, 1.0):
            for name, live in trainer.live.items():
                live.copy_(weights[name]).mul_(factor if live.dim() > 1 else 1.0)
            began = time.perf_counter()
            report = await trainer.sync_live()
            seconds = time.perf_counter() - began
            said.append(await answers())
    finally:
        if trainer is not None:
            trainer.close()
        await replica.close()
    own, same, other, again = said
    for what, right in (
        ("the same weights made it say something else", same == own),
        ("other weights made no difference", other != own),
        ("with the first weights back it says something else", again == own),
    ):
        if not right:
            raise RuntimeError(f"{what}: {said}")
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    return {
        "GB": nbytes / 1e9,
        "version, ms": 1e3 * seconds,
        "rollout blocked, ms": 1e3 * report.rollout_blocked_s,
        "GB/s": nbytes / seconds / 1e9,
    }


def main() -> int:
    """Measure every model, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--engine", default="cuda_ipc")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for model in options.models:
        found = asyncio.run(measure(model, options.tp, options.engine))
        figures |= {f"{name_of(model)}: {what}": value for what, value in found.items()}
        if options.json is not None:  # what was found stays when a later model fails
            options.json.write_text(json.dumps({"figures": figures}) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
