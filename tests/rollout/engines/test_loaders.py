"""The built-in engines beside vLLM: what they serve of a version is, bit for bit, an ordinary load of its files."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import DTYPES, assert_same, random_bits
from publishing import OneRankTrainer
from safetensors.torch import load_file
from tiny_models import copy_with, left_of, load_tensors, make_qwen3, make_qwen3_moe
from transformers import AutoModelForCausalLM
from waiting import HANG_S
from zoo_kind import make
from zoo_models import KINDS

from weightlane.ckpt_engines import ConfigError
from weightlane.rollout import LocalReplica, RolloutConfig
from weightlane.rollout.contract.requests import GenerationRequest, Sampling
from weightlane.rollout.engines.sglang.loader import directory_of
from weightlane.rollout.engines.transformers.decoding import Decoding
from weightlane.rollout.engines.transformers.loader import TransformersLoader

USUAL = ("qwen3-tied", "gemma3", "gpt2", "bloom", "mixtral", "gpt-oss", "deepseek-v3", "mamba2", "qwen3-next")
"""Architectures that differ in their tensors: tied, fused, renamed, stacked, with biases, computed."""
NO_LANGUAGE_MODELS = ("qwen3-classes", "bert", "bert-classes")


def state(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, under all of its names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


@pytest.mark.parametrize(
    "kinds",
    [USUAL, pytest.param([*KINDS.keys() - {*NO_LANGUAGE_MODELS}], marks=pytest.mark.exhaustive)],
    ids=["usual", "all"],
)
def test_transformers_loads_a_version_as_its_files_whatever_their_bits(kinds: list[str], tmp_path: Path) -> None:
    for kind, dtype in itertools.product(kinds, (torch.float32, torch.bfloat16)):
        folder = tmp_path / f"{kind}-{dtype}"
        first = make(KINDS[kind], folder / "first", seed=1, dtype=dtype)
        version = {
            name: random_bits(tuple(tensor.shape), tensor.dtype, seed=place) if tensor.is_floating_point() else tensor
            for place, (name, tensor) in enumerate(load_tensors(first).items())
        }
        wanted = AutoModelForCausalLM.from_pretrained(copy_with(version, first, folder / "next"))
        served: list[Any] = []
        loader = TransformersLoader(first, None, "rank", served.append)
        assert set(version) <= set(loader.expectation.tensors), kind
        loader.write(version)
        loader.settle()
        for tensor in version.values():
            tensor.zero_()  # borrowed: the model must not have kept it
        assert_same(state(served[0]), state(wanted))
        shutil.rmtree(folder)


def test_a_checkpoint_that_lacks_tensors_of_its_model_is_refused(tmp_path: Path) -> None:
    model = make(KINDS["qwen3-classes"], tmp_path / "model", seed=1, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"lacks 1 tensors of Qwen3ForCausalLM, such as lm_head\.weight"):
        TransformersLoader(model, None, "rank", lambda _: None)


@pytest.mark.parametrize(
    ("backend", "publishing"),
    [("shm", {}), ("gloo", {"codec": "delta"}), ("filesystem", {"quantise": "fp8"})],
    ids=["shm-dense", "gloo-delta", "filesystem-fp8"],
)
def test_a_published_version_is_served_as_a_fresh_load_of_it(
    backend: str, publishing: dict[str, Any], tmp_path: Path
) -> None:
    models = [make_qwen3(tmp_path / str(seed), seed=seed) for seed in range(2)]
    nudged = load_tensors(models[1])
    nudged["model.norm.weight"][3] += 1

    async def life() -> None:
        options = {"path": str(tmp_path / "store")} if backend == "filesystem" else {}
        trainer = OneRankTrainer(models[0], backend, options, **publishing)
        replica = LocalReplica("rollout-0", RolloutConfig(engine="transformers", max_model_len=32), models[0])
        await replica.start()
        await replica.connect(trainer.address, backend, options)
        await trainer.connect([replica])
        for place, sent in enumerate((load_tensors(models[1]), nudged)):
            await trainer.sync(sent)
            left = left_of(sent) if publishing.get("quantise") else sent
            wanted = AutoModelForCausalLM.from_pretrained(copy_with(left, models[0], tmp_path / f"left-{place}"))
            engine: Any = replica._engine
            assert_same(state(engine._model), state(wanted))
        assert trainer.codecs[-1] == publishing.get("codec", "dense")
        await replica.close()
        trainer.close()

    asyncio.run(asyncio.wait_for(life(), HANG_S))


def test_the_experts_of_a_completion_are_those_of_the_first_reading_of_each_token_also_after_a_commit(
    tmp_path: Path,
) -> None:
    """Row by row those of transformers' router over the whole sequence. The commit comes after three tokens."""
    paths = [make_qwen3_moe(tmp_path / str(seed), seed=seed) for seed in range(2)]
    first, second = (AutoModelForCausalLM.from_pretrained(path).eval() for path in paths)
    prompt = [5, 300, 17, 4]
    decoding = Decoding(GenerationRequest("", "", prompt, Sampling(6, seed=1)), None, returns_experts=True)
    for version, model in enumerate([first] * 3 + [second] * 3):
        if version == 3:
            assert decoding.drop_cache() == len(prompt) + 3
        decoding.step(model, version)
    completion = decoding.completion()
    ids = torch.tensor([[*prompt, *completion.token_ids[:-1]]])
    wanted = [
        torch.stack(model(ids, output_router_logits=True).router_logits, 1).topk(2).indices.sort(-1).values
        for model in (first, second)
    ]
    found = torch.from_numpy(completion.routed_experts).long().sort(-1).values
    read = len(prompt) + 2
    assert torch.equal(found[:read], wanted[0][:read])
    assert torch.equal(found[read:], wanted[1][read:])
    assert not torch.equal(*(each[:read] for each in wanted))


def test_sglang_is_given_the_bits_of_a_version() -> None:
    shapes = ((), (3,), (0, 2), (5, 7))
    tensors = {
        f"{dtype} {shape}": random_bits(shape, dtype, seed=place)
        for place, (dtype, shape) in enumerate((dtype, shape) for dtype in DTYPES for shape in shapes)
    }
    tensors["a transposed one"] = random_bits((4, 6), torch.float32).T
    with directory_of(tensors) as directory:
        (file,) = directory.iterdir()
        assert_same(load_file(file), tensors)
    assert not directory.exists()
