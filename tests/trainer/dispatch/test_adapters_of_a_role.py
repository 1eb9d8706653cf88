"""A role trains many adapters at once and publishes any of them: each ends bit for bit as if it were alone."""

from __future__ import annotations

import asyncio
import math
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_roles import CARRIER, CONFIGS, LAYOUTS, MODEL, opened, publishing, run, written
from engine_batches import Sample, batch_of, make_batch
from engine_ranks import Teams, assert_same, checkpoint
from safetensors.torch import load_file

from weightlane.ckpt_engines import ConfigError, ProtocolError
from weightlane.sync import Coordinator
from weightlane.trainer.config import LoraConfig, TrainerConfig
from weightlane.trainer.data.batch import LossDenominators
from weightlane.trainer.dispatch.role import Role
from weightlane.trainer.engines.optimizers.settings import AdamParams

PARAMS = {
    "a": AdamParams(3e-3, weight_decay=0.1),
    "b": AdamParams(0.02, betas=(0.8, 0.95), eps=1e-6, max_grad_norm=math.inf),
}
STEPS = 2
ONE_STEP = ("forward_backward", "forward_backward", "optim_step")
Call = tuple[str, str, int]
"""A method, its adapter, and the number of the batch or step."""


def begin(role: Role, call: Call) -> asyncio.Task[Any]:
    method, adapter, number = call
    if method == "optim_step":
        return role.optim_step(adapter, PARAMS[adapter])
    both = LossDenominators.of(*(make_batch(each) for each in (number - number % 2, number - number % 2 + 1)))
    return role.forward_backward(make_batch(number), "loss", both, adapter=adapter)


def steps(adapter: str, first: int = 0, count: int = STEPS) -> list[Call]:
    return [
        (method, adapter, 2 * step + part % 2)
        for step in range(first, first + count)
        for part, method in enumerate(ONE_STEP)
    ]


async def train(role: Role, adapter: str, first: int = 0, count: int = STEPS) -> list[float]:
    """Take steps; returns the gradient norms."""
    answers = await asyncio.gather(*(begin(role, call) for call in steps(adapter, first, count)))
    return [answer.grad_norm for answer in answers if hasattr(answer, "grad_norm")]


def padded(directory: Path, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An adapter in PEFT's files, with zeros up to the shapes of `like`."""
    mine, found = load_file(directory / "adapter_model.safetensors"), {}
    assert mine.keys() <= like.keys()
    for name, larger in like.items():
        found[name] = torch.zeros(larger.shape)
        if name in mine:
            rows, columns = mine[name].shape
            found[name][:rows, :columns] = mine[name]
    return found


async def fail(role: Role) -> None:
    """Mini-batches of adapter a that fail, or that have no finite gradient."""
    unknown_token = batch_of([Sample((1,), (9999, 3), (-4.0, -4.0), 1.0)] * 4)
    too_large = batch_of([Sample((1,), (2, 3), (-4.0, -4.0), 3e38)] * 4)
    await begin(role, steps("a")[0])
    with pytest.raises(ProtocolError, match="9999"):
        await role.forward_backward(
            unknown_token, "loss", LossDenominators.of(make_batch(0), make_batch(1)), adapter="a"
        )
    for call in steps("a")[1:3]:
        with pytest.raises(ProtocolError, match=r"a part of the mini-batch has no gradient: .*9999"):
            await begin(role, call)
    await role.forward_backward(too_large, "loss", adapter="a")
    skipped = await role.optim_step("a", PARAMS["a"])
    assert (skipped.step, skipped.grad_norm) == (0, 0.0)
    assert "gradient norm of 'a'" in skipped.skipped


async def interleaved(role: Role, coordinator: Coordinator, directory: Path) -> dict[str, list[float]]:
    """Take the steps of all adapters in any order, after failures of one amid a mini-batch of the other.

    Publish each after its step, and write into `directory` what it is by then. Nothing waits for a version to arrive but the next
    one. Returns the gradient norms by adapter.
    """
    rng, left = random.Random(2), {name: steps(name) for name in CONFIGS}
    answers: dict[str, list[asyncio.Task[Any]]] = {name: [] for name in CONFIGS}
    answers["b"].append(begin(role, left["b"].pop(0)))
    await fail(role)
    syncing, version = asyncio.create_task(asyncio.sleep(0.0)), 0
    while any(left.values()):
        name = rng.choice([name for name, todo in left.items() if todo])
        call = left[name].pop(0)
        answers[name].append(begin(role, call))
        if call[0] == "optim_step":
            await syncing
            version += 1
            await role.export_adapter(directory / f"{version}", name, with_optimizer=False)
            await role.publish(version, name)
            syncing = asyncio.create_task(coordinator.sync(version))
    await syncing
    results = {name: (await asyncio.gather(*each))[2::3] for name, each in answers.items()}
    assert all([result.step for result in each] == [1, 2] for each in results.values())
    return {name: [result.grad_norm for result in each] for name, each in results.items()}


@pytest.mark.parametrize("settings", LAYOUTS)
def test_adapters_end_as_if_alone_whatever_is_interleaved_failed_or_published(
    teams: Teams, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Each publication is, bit for bit, PEFT's files padded with zeros."""
    norms: dict[str, list[float]] = {}
    wanted = {}

    async def alone(name: str) -> None:
        async with opened(teams, **settings) as role:
            assert await role.add_adapter(name, CONFIGS[name]) == 0
            norms[name] = await train(role, name)
            wanted[name] = await written(role, name, tmp_path / name)

    async def together() -> None:
        async with opened(teams, lora=CARRIER, **settings) as role:
            for name, config in CONFIGS.items():
                await role.add_adapter(name, config)
            await role.export_adapter(tmp_path / "carrier", "default", with_optimizer=True)
            assert not (tmp_path / "carrier/optimizer.safetensors").exists(), "it only travels"
            carrier = load_file(tmp_path / "carrier/adapter_model.safetensors")
            async with publishing(role, carrier) as (coordinator, keeper):
                assert await interleaved(role, coordinator, tmp_path) == norms
            assert len(keeper.versions) == STEPS * len(CONFIGS)
            for version, tensors in keeper.versions.items():
                assert_same(tensors, padded(tmp_path / f"{version}", carrier))
            for name in CONFIGS:
                assert_same(await written(role, name, tmp_path / f"{name} together"), wanted[name])

    for name in CONFIGS:
        run(lambda name=name: alone(name))
    run(together)
    assert all(tensor.any() for key, tensor in wanted["a"].items() if "lora_B" in key)


def test_an_adapter_resumes_its_optimizer_or_begins_a_fresh_one_and_replaces_one_of_its_name(
    teams: Teams, tmp_path: Path
) -> None:
    async def use() -> None:
        config = CONFIGS["a"]
        async with opened(teams) as role:
            await role.add_adapter("a", config)
            await train(role, "a", 0, 2)
            saved = await written(role, "a", tmp_path / "saved")
            norms = await train(role, "a", 2, 1)
            wanted = await written(role, "a", tmp_path / "wanted")

            await begin(role, steps("a")[0])  # its gradient goes with it
            assert await role.add_adapter("a", config, tmp_path / "saved") == 2
            assert_same(await written(role, "a", tmp_path / "resumed"), saved)
            assert await train(role, "a", 2, 1) == norms
            assert_same(await written(role, "a", tmp_path / "again"), wanted)

            shutil.copytree(tmp_path / "saved", tmp_path / "weights")
            (tmp_path / "weights/optimizer.safetensors").unlink()
            fresh = []
            for source, optimizer in (("saved", False), ("weights", True)):
                assert await role.add_adapter("a", config, tmp_path / source, optimizer=optimizer) == 0
                assert await train(role, "a", 2, 1) == norms, "the gradient is that of the same values"
                fresh.append(await written(role, "a", tmp_path / f"fresh from {source}"))
            assert_same(*fresh)
            assert not torch.equal(*(next(iter(each.values())) for each in (fresh[0], wanted))), "moments matter"

            with pytest.raises(ConfigError, match="has rank 3, the configuration 4"):
                await role.add_adapter("a", config.model_copy(update={"rank": 4}), tmp_path / "saved")
            assert_same(await written(role, "a", tmp_path / "kept"), fresh[0])
            await role.remove_adapter("a")
            for call in (
                lambda: role.remove_adapter("a"),
                lambda: role.optim_step("a"),
                lambda: begin(role, steps("a")[0]),
            ):
                with pytest.raises(ConfigError, match="there is no adapter 'a'"):
                    await call()

    run(use)


def test_what_cannot_be_published_in_its_place_is_refused_and_leaves_what_was_there(
    teams: Teams, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"lora would train an adapter, unless lora\.publish is"):
        TrainerConfig(frozen=True, lora=LoraConfig())
    small = CARRIER.model_copy(update={"rank": 2, "targets": ("k_proj", "down_proj")})

    async def refused(role: Role, adapter: str, says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            await role.publish(1, adapter)

    async def use() -> None:
        async with opened(teams, lora=small) as role:
            for name, config in CONFIGS.items():
                await role.add_adapter(name, config)
            first = await written(role, "default", tmp_path / "default")
            carrier = load_file(tmp_path / "default/adapter_model.safetensors")
            async with publishing(role, carrier) as (coordinator, keeper):
                await refused(role, "a", "'a' has rank 3, and what is published rank 2")
                await refused(role, "b", "'b' is beside gate_proj, which what is published is not")
                await refused(role, "c", "there is no adapter 'c'")
                await refused(role, "", "the model's own weights cannot be published as an adapter")
                await role.publish(1)
                await coordinator.sync(1)
                assert_same(keeper.versions[1], carrier)
            assert_same(await written(role, "default", tmp_path / "still"), first)
            with pytest.raises(ConfigError, match="'default' only computes"):
                await role.forward_backward(make_batch(0), "loss")
            with pytest.raises(ConfigError, match="there is an adapter 'default' already"):
                await role.add_adapter("default", small)
            await role.save(tmp_path / "state")
            assert await role.load(tmp_path / "state") == 0
            await role.export_hf(tmp_path / "model", "float32")
            assert_same(checkpoint(tmp_path / "model"), checkpoint(teams.models[MODEL]))
        async with opened(teams, lora=CARRIER, frozen=False) as role:
            await role.add_adapter("a", CONFIGS["a"])
            await role.forward_backward(make_batch(0), "loss")
            await written(role, "default", tmp_path / "own")
            async with publishing(role, load_file(tmp_path / "own/adapter_model.safetensors")):
                await refused(role, "a", "in the place of 'default', which is trained itself")
        async with opened(teams, lora=LoraConfig(), frozen=False) as role:
            await role.add_adapter("a", CONFIGS["a"])
            async with publishing(role, checkpoint(teams.models[MODEL])):
                await refused(role, "a", "'a' cannot be published as an adapter, since versions are weights")

    run(use)
