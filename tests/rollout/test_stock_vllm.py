"""Any vLLM becomes a rollout replica by its own door: ``weight_transfer_config`` and four calls, nothing of ours around it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from json_program import Program
from publishing import OneRankTrainer
from tiny_models import (
    greedy_tokens,
    load_tensors,
    make_blocky_qwen3,
    make_llama,
    make_qwen3,
    make_qwen3_moe,
    quantised_copy,
    vllm_parameters,
)
from waiting import HANG_S

from weightlane.ckpt_engines import SyncAbortedError, WeightlaneError
from weightlane.sync import CommitReport

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
PROMPT = [4, 5, 6]


@pytest.fixture(scope="module")
def offline() -> Iterator[Program]:
    """`offline_process.py`."""
    started = Program(Path(__file__).with_name("offline_process.py"), env=ENVIRONMENT)
    yield started
    started.kill()


@dataclass
class StockReplica:
    """Drives a vLLM that knows nothing of weightlane but its weight-transfer engine."""

    offline: Program
    name: str = "stock"

    def subscriber_names(self) -> list[str]:
        return ["stock/0"]

    async def commit(self, version: int) -> CommitReport:
        await asyncio.to_thread(self.offline.call, "commit", version)
        return CommitReport(version, blocked_s=0.0)

    async def rollback(self, version: int) -> None:
        raise AssertionError("every version is taken")

    async def quarantine(self, error: WeightlaneError) -> None:
        raise error


@pytest.mark.parametrize(
    ("architecture", "tied", "dtype", "backend"),
    [
        ("llama", True, "float32", "filesystem"),
        ("llama", True, "bfloat16", "shm"),
        ("qwen3", False, "bfloat16", "gloo"),
    ],
)
def test_offline_vllm_takes_a_version_through_its_own_weight_transfer_calls(
    architecture: str, tied: bool, dtype: str, backend: str, offline: Program, tmp_path: Path
) -> None:
    make = {"qwen3": make_qwen3, "llama": make_llama}[architecture]
    models = [
        make(tmp_path / f"model{seed}", seed=seed, tied=tied, dtype=getattr(torch, dtype), vocab=300)
        for seed in range(2)
    ]
    options = {"path": str(tmp_path / "versions")} if backend == "filesystem" else {}
    offline.call("start", str(models[0]), dtype, "weightlane")
    trainer = OneRankTrainer(models[0], backend, options)
    assert offline.call("connect", trainer.address, backend, options) == ""

    async def life() -> None:
        await trainer.connect([StockReplica(offline)])
        await trainer.sync(models[1])

    asyncio.run(asyncio.wait_for(life(), HANG_S))
    trainer.close()
    wanted = vllm_parameters(load_tensors(models[1]))
    assert offline.call("parameters") == {name: described(tensor) for name, tensor in wanted.items()}
    if dtype == "float32":
        assert offline.call("greedy", PROMPT, 12) == greedy_tokens(models[1], PROMPT, 12)


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_a_quantised_model_takes_versions_in_its_own_format(
    scheme: Literal["fp8", "int8"], offline: Program, tmp_path: Path
) -> None:
    """Bit for bit what vLLM holds that was started from the version's checkpoint; and it says the same."""
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's fp8 and int8 layers need AMX on a CPU")
    plain = [make_blocky_qwen3(tmp_path / f"model{seed}", seed=seed) for seed in range(3)]
    quantised = [quantised_copy(model, tmp_path / f"{model.name}-{scheme}", scheme) for model in plain]
    held: list[Any] = []
    for model in quantised[1:]:
        offline.call("start", str(model), "bfloat16", None)
        held.append((offline.call("parameters"), offline.call("greedy", PROMPT, 12)))
    offline.call("start", str(quantised[0]), "bfloat16", "weightlane")
    trainer = OneRankTrainer(plain[0], "shm", quantise=scheme)
    assert offline.call("connect", trainer.address, "shm", {}) == ""

    async def life() -> None:
        await trainer.connect([StockReplica(offline)])
        for model, (parameters, tokens) in zip(plain[1:], held, strict=True):
            await trainer.sync(model)
            assert offline.call("parameters") == parameters
            assert offline.call("greedy", PROMPT, 12) == tokens

    asyncio.run(asyncio.wait_for(life(), HANG_S))
    trainer.close()


def test_a_quantised_model_refuses_what_is_not(offline: Program, tmp_path: Path) -> None:
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's fp8 layers need AMX on a CPU")
    model = make_blocky_qwen3(tmp_path / "model", seed=0)
    offline.call("start", str(quantised_copy(model, tmp_path / "fp8", "fp8")), "bfloat16", "weightlane")
    trainer = OneRankTrainer(model, "shm")
    assert offline.call("connect", trainer.address, "shm", {}) == ""
    before = offline.call("parameters")

    async def life() -> None:
        await trainer.connect([StockReplica(offline)])
        with pytest.raises(SyncAbortedError, match="is bfloat16, expected float8_e4m3fn"):
            await trainer.sync(model)

    asyncio.run(asyncio.wait_for(life(), HANG_S))
    trainer.close()
    assert offline.call("parameters") == before


def described(tensor: torch.Tensor) -> list[object]:
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(raw).hexdigest()]


def test_experts_are_computed_from_their_parameters_before_and_after_a_version(
    offline: Program, tmp_path: Path
) -> None:
    models = [make_qwen3_moe(tmp_path / f"model{seed}", seed=seed, normalised=False) for seed in range(2)]
    offline.call("start", str(models[0]), "float32", "weightlane")
    assert offline.call("greedy", PROMPT, 12) == greedy_tokens(models[0], PROMPT, 12)
    trainer = OneRankTrainer(models[0], "shm")
    assert offline.call("connect", trainer.address, "shm", {}) == ""

    async def life() -> None:
        await trainer.connect([StockReplica(offline)])
        await trainer.sync(models[1])

    asyncio.run(asyncio.wait_for(life(), HANG_S))
    trainer.close()
    wanted = vllm_parameters(load_tensors(models[1]))
    assert offline.call("parameters") == {name: described(tensor) for name, tensor in wanted.items()}
    assert offline.call("greedy", PROMPT, 12) == greedy_tokens(models[1], PROMPT, 12)


def test_an_engine_that_does_not_use_weightlane_packs_its_layers_as_before(offline: Program, tmp_path: Path) -> None:
    offline.call("start", str(make_qwen3(tmp_path, seed=0)), "float32", None)
    _, shape, _ = offline.call("parameters")["model.layers.0.mlp.gate_up_proj.weight"]
    assert 0 in shape


def test_an_engine_that_does_not_use_weightlane_computes_experts_with_vllms_kernel(
    offline: Program, tmp_path: Path
) -> None:
    model = make_qwen3_moe(tmp_path, seed=0)
    offline.call("start", str(model), "float32", None)
    name = "model.layers.0.mlp.experts.routed_experts.w13_weight"
    assert offline.call("parameters")[name] != described(vllm_parameters(load_tensors(model))[name])
    assert offline.call("greedy", PROMPT, 12) == greedy_tokens(model, PROMPT, 12)
