"""Any vLLM becomes a rollout replica by its own door: ``weight_transfer_config`` and four calls, nothing of ours around it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from publishing import OneRankTrainer
from tiny_models import greedy_tokens, make_qwen3, make_qwen3_moe

from weightlane.rollout.wire import failure_from_text
from weightlane.sync import CommitReport

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}

_START = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
llm = LLM(sys.argv[1], dtype="float32", max_model_len=128, enforce_eager=True, kv_cache_memory_bytes=64 << 20,
          skip_tokenizer_init=True, weight_transfer_config={"backend": sys.argv[2]} if sys.argv[2:] else None)
def say(value): print("SAY" + json.dumps(value), flush=True)
def hear(): return json.loads(sys.stdin.readline())
"""

_SERVE = (
    _START
    + """
llm.init_weight_transfer_engine(WeightTransferInitRequest(
    init_info={"rendezvous": hear(), "replica": "stock", "backend": "filesystem", "options": hear()}))
say("connected")
version = hear()
llm.start_weight_update()
llm.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
llm.finish_weight_update()
llm.reset_prefix_cache()
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
[answer] = llm.generate([{"prompt_token_ids": [4, 5, 6]}], params, use_tqdm=False)
say(list(answer.outputs[0].token_ids))
"""
)

_REFUSE = (
    _START
    + """
try:
    llm.init_weight_transfer_engine(WeightTransferInitRequest(
        init_info={"rendezvous": {}, "replica": "stock", "backend": "shm"}))
except Exception as error:
    say(str(error))
"""
)

_PACKING = (
    _START
    + """
model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
say(model.model.layers[0].mlp.gate_up_proj.weight.numel())
"""
)


class Child:
    """A Python process that speaks JSON lines."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )

    def tell(self, value: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("SAY"):
                return json.loads(line.removeprefix("SAY"))
        raise AssertionError(f"the child ended with {self.process.wait(30.0)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class StockReplica:
    """Drives a vLLM that knows nothing of weightlane but its weight-transfer engine."""

    child: Child
    name: str = "stock"
    tokens: list[int] | None = None

    def subscriber_names(self) -> list[str]:
        return ["stock/0"]

    async def commit(self, version: int) -> CommitReport:
        self.child.tell(version)
        self.tokens = await asyncio.to_thread(self.child.hear)
        return CommitReport(version, blocked_s=0.0)


def test_offline_vllm_takes_a_version_through_its_own_weight_transfer_calls(tmp_path: Path) -> None:
    models = [make_qwen3(tmp_path / f"model{seed}", seed=seed, tied=True) for seed in range(2)]
    options = {"path": str(tmp_path / "versions")}
    with Child(_SERVE, str(models[0]), "weightlane") as child:
        trainer = OneRankTrainer(models[0], "filesystem", options)
        child.tell(trainer.address)
        child.tell(options)
        assert child.hear() == "connected"
        replica = StockReplica(child)

        async def life() -> None:
            await trainer.connect([replica])
            await trainer.sync(models[1])

        asyncio.run(asyncio.wait_for(life(), 60.0))
        trainer.close()
    assert replica.tokens == greedy_tokens(models[1], [4, 5, 6], 12)


def test_mixture_of_experts_on_cpu_is_refused_by_name(tmp_path: Path) -> None:
    model = make_qwen3_moe(tmp_path, seed=0)
    with Child(_REFUSE, str(model), "weightlane") as child:
        failure = failure_from_text(child.hear(), part="stock")
    assert type(failure.error).__name__ == "ConfigError"
    assert "model.layers.0.mlp.experts" in failure.error.message
    assert failure.intact


def test_an_engine_that_does_not_use_weightlane_packs_its_layers_as_before(tmp_path: Path) -> None:
    model = make_qwen3(tmp_path, seed=0)
    with Child(_PACKING, str(model)) as child:
        assert child.hear() == 0
