"""Any vLLM becomes a rollout replica by its own calls: ``weight_transfer_config`` and four calls, nothing of ours around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_forms import HUB_FORMS
from json_program import Program
from publishing import OneRankTrainer, PlainReplica
from tiny_models import (
    add_tokenizer,
    copy_with,
    described,
    greedy_tokens,
    load_tensors,
    make_blocky_qwen3,
    make_qwen3,
    make_qwen3_moe,
    quantised_copy,
    vllm_parameters,
)
from waiting import HANG_S
from zoo_kind import make
from zoo_models import KINDS

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


def looks(offline: Program) -> list[Any]:
    return [offline.call("parameters"), offline.call("greedy", PROMPT, 12)]


def take_versions(
    offline: Program, trainer: OneRankTrainer, models: Sequence[Path], looks: Callable[[Program], Any] = looks
) -> list[Any]:
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


@pytest.mark.parametrize(("dtype", "backend"), [("bfloat16", "filesystem"), ("float32", "gloo")])
def test_offline_vllm_takes_a_version_through_its_own_weight_transfer_calls(
    dtype: str, backend: str, offline: Program, tmp_path: Path
) -> None:
    """A tied model whose files hold the head as well, from a store, and a mixture of experts over a wire."""
    models = [tmp_path / "first", tmp_path / "second"]
    for seed, model in enumerate(models):
        if dtype == "float32":
            make_qwen3_moe(model, seed=seed, normalised=False)
        else:
            make_qwen3(model, seed=seed, dtype=torch.bfloat16, tied=True)
    served = models[0]
    if dtype == "bfloat16":
        tensors = load_tensors(served)
        head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        served = copy_with(tensors | head, served, tmp_path / "served")
    offline.call("start", str(served), dtype, "weightlane")
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
    quantised = [quantised_copy(model, tmp_path / f"{model.name}-fp8") for model in plain]
    offline.call("start", str(quantised[1]), "bfloat16", None)
    wanted = looks(offline)
    offline.call("start", str(quantised[0]), "bfloat16", "weightlane")
    assert take_versions(offline, OneRankTrainer(plain[0], quantise="fp8"), plain[1:]) == [wanted]
    with pytest.raises(SyncAbortedError, match="is bfloat16, expected float8_e4m3fn"):
        take_versions(offline, OneRankTrainer(plain[0]), plain)
    assert looks(offline) == wanted


def test_an_embedding_model_from_a_hub_gives_the_embeddings_of_one_that_was_started_with_the_version(
    offline: Program, tmp_path: Path
) -> None:
    """A full version and a delta, under the trainer's names and with masks that no rank reads, which change as well."""
    form, kind = HUB_FORMS["gpt2"], replace(KINDS["gpt2"], sizes=KINDS["gpt2"].sizes | {"n_embd": 128})
    like = [make(kind, tmp_path / f"plain{seed}", seed=seed, dtype=torch.float32) for seed in range(2)]
    versions = [form.with_unread(load_tensors(model)) for model in like]
    versions.append({name: tensor.clone() for name, tensor in versions[1].items()})
    for tensor in versions[2].values():
        tensor.view(-1)[1] += 1
    sent = [copy_with(version, like[0], tmp_path / f"sent{number}") for number, version in enumerate(versions)]
    served = [copy_with(form.files(versions[number]), like[0], tmp_path / f"hub{number}") for number in (0, 2)]
    for model in served:
        add_tokenizer(model)  # vLLM serves no embeddings without one

    def embedding(offline: Program) -> Any:
        return offline.call("embedding", PROMPT)

    offline.call("start", str(served[1]), "float32", "weightlane", "pooling")
    wanted = embedding(offline)
    offline.call("start", str(served[0]), "float32", "weightlane", "pooling")
    before = embedding(offline)
    trainer = OneRankTrainer(sent[0], "filesystem", {"path": str(tmp_path / "versions")}, codec="delta")
    full, delta = take_versions(offline, trainer, sent[1:], embedding)
    assert trainer.codecs == ["dense", "delta"]
    assert delta == wanted
    assert len({*map(tuple, (before, full, wanted))}) == 3


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
