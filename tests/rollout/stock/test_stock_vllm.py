"""Any vLLM becomes a rollout replica by its own calls: ``weight_transfer_config`` and four calls, nothing of ours around it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from json_program import Program
from publishing import OneRankTrainer, PlainReplica
from tiny_models import (
    described,
    greedy_tokens,
    load_tensors,
    make_blocky_qwen3,
    make_llama,
    make_qwen3_moe,
    quantised_copy,
    vllm_parameters,
)
from waiting import HANG_S

from weightlane.ckpt_engines import SyncAbortedError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
PROMPT = [4, 5, 6]
OFFLINE = Path(__file__).with_name("offline_process.py")


@pytest.fixture(scope="module")
def offline() -> Iterator[Program]:
    """`offline_process.py`, without AMX."""
    started = Program(OFFLINE, env=ENVIRONMENT)
    yield started
    started.kill()


@pytest.fixture
def offline_with_amx(amx: None) -> Iterator[Program]:
    """The same, with AMX: vLLM's fp8 layers need it on a CPU."""
    started = Program(OFFLINE, env=ENVIRONMENT)
    yield started
    started.kill()


def take_versions(offline: Program, trainer: OneRankTrainer, models: Sequence[Path]) -> list[Any]:
    """Let vLLM take each version by its own calls; return its parameters and greedy tokens after each."""
    replica = PlainReplica("stock", lambda version: offline.call("commit", version))
    held = []

    async def life() -> None:
        await trainer.connect([replica])
        for model in models:
            await trainer.sync(model)
            held.append(looks(offline))

    with closing(trainer):
        assert offline.call("connect", trainer.address, trainer.backend, trainer.options) == ""
        asyncio.run(asyncio.wait_for(life(), HANG_S))
    return held


def looks(offline: Program) -> list[Any]:
    return [offline.call("parameters"), offline.call("greedy", PROMPT, 12)]


@pytest.mark.parametrize(("dtype", "backend"), [("bfloat16", "filesystem"), ("float32", "gloo")])
def test_offline_vllm_takes_a_version_through_its_own_weight_transfer_calls(
    dtype: str, backend: str, offline: Program, tmp_path: Path
) -> None:
    """A Llama in bfloat16 from a store, and a mixture of experts in float32 over a wire."""
    models = [tmp_path / "first", tmp_path / "second"]
    for seed, model in enumerate(models):
        if dtype == "float32":
            make_qwen3_moe(model, seed=seed, normalised=False)
        else:
            make_llama(model, seed=seed, dtype=torch.bfloat16, vocab=300)
    offline.call("start", str(models[0]), dtype, "weightlane")
    before = looks(offline)
    options = {"path": str(tmp_path / "versions")} if backend == "filesystem" else {}
    after = take_versions(offline, OneRankTrainer(models[0], backend, options), models[1:])
    for model, (parameters, tokens) in zip(models, [before, *after], strict=True):
        wanted = vllm_parameters(load_tensors(model))
        assert parameters == {name: described(tensor) for name, tensor in wanted.items()}
        if dtype == "float32":
            assert tokens == greedy_tokens(model, PROMPT, 12)


def test_a_quantised_model_takes_versions_in_its_own_format_and_no_others(
    offline_with_amx: Program, tmp_path: Path
) -> None:
    """Bit for bit what vLLM holds that was started from the version's checkpoint; and it says the same."""
    offline = offline_with_amx
    plain = [make_blocky_qwen3(tmp_path / f"model{seed}", seed=seed) for seed in range(2)]
    quantised = [quantised_copy(model, tmp_path / f"{model.name}-fp8", "fp8") for model in plain]
    offline.call("start", str(quantised[1]), "bfloat16", None)
    wanted = looks(offline)
    offline.call("start", str(quantised[0]), "bfloat16", "weightlane")
    assert take_versions(offline, OneRankTrainer(plain[0], quantise="fp8"), plain[1:]) == [wanted]
    with pytest.raises(SyncAbortedError, match="is bfloat16, expected float8_e4m3fn"):
        take_versions(offline, OneRankTrainer(plain[0]), plain)
    assert looks(offline) == wanted


def test_an_engine_that_does_not_use_weightlane_packs_its_layers_and_experts_as_before(
    offline: Program, tmp_path: Path
) -> None:
    model = make_qwen3_moe(tmp_path / "experts", seed=0)
    offline.call("start", str(model), "float32", None)
    parameters, tokens = looks(offline)
    _, shape, _ = parameters["model.layers.0.self_attn.qkv_proj.weight"]
    assert 0 in shape
    name = "model.layers.0.mlp.experts.routed_experts.w13_weight"
    assert parameters[name] != described(vllm_parameters(load_tensors(model))[name])
    assert tokens == greedy_tokens(model, PROMPT, 12)
