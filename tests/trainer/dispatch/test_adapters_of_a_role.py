"""A role trains many adapters at once and publishes any of them: each ends bit for bit as if it were alone."""

from __future__ import annotations

import asyncio
import math
import random
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peft_oracle
import pytest
import torch
from engine_batches import Sample, batch_of, make_batch, make_samples
from engine_ranks import FSDP2_TP2, TRAINER, Ranks, Teams, assert_same, checkpoint, megatron
from published_versions import publishing
from safetensors.torch import load_file
from team_ranks import TeamRanks
from waiting import HANG_S

from weightlane.ckpt_engines import ConfigError, ProtocolError
from weightlane.sync import Coordinator
from weightlane.trainer.config import AlgorithmConfig, LoraConfig, TrainerConfig
from weightlane.trainer.data.batch import MiniBatch, TokenBatch
from weightlane.trainer.dispatch.dispatch import Role, WorkerDispatch
from weightlane.trainer.dispatch.role import RoleSpec, StepPart, StepResult
from weightlane.trainer.engines.adam_params import AdamParams
from weightlane.trainer.engines.lora.joint import BackwardPart
from weightlane.trainer.objectives.loss import LOGPROBS
from weightlane.trainer.objectives.named import Objective
from weightlane.trainer.objectives.supervised import WEIGHTS, sft

MODEL = "qwen3-tied"
CARRIER = LoraConfig(rank=5, publish="adapter")
CONFIGS = {
    "a": LoraConfig(rank=3, alpha=6, seed=1, targets=("q_proj", "o_proj", "up_proj", "down_proj")),
    "b": LoraConfig(rank=2, targets=("k_proj", "gate_proj", "down_proj")),
}
PARAMS = {
    "a": AdamParams(3e-3, weight_decay=0.1),
    "b": AdamParams(0.02, betas=(0.8, 0.95), eps=1e-6, max_grad_norm=math.inf),
}
STEPS = 3
ONE_STEP = ("forward_backward", "forward_backward", "optim_step")
Call = tuple[str, str, int]
"""A method, its adapter, and the number of the batch or step."""
LAYOUTS = [
    pytest.param(1, {}, id="fsdp2-1"),
    pytest.param(2, {}, id="fsdp2-2"),
    pytest.param(2, FSDP2_TP2, id="fsdp2-tp2"),
    pytest.param(2, megatron({"tensor_parallel": 2}), id="megatron-tp2", marks=pytest.mark.megatron),
    pytest.param(
        2,
        megatron({"pipeline_parallel": 2}),
        id="megatron-pp2",
        marks=[pytest.mark.megatron, pytest.mark.exhaustive],
    ),
]


@asynccontextmanager
async def opened(teams: Teams, world: int, **trainer: Any) -> AsyncIterator[Role]:
    """A role on a team of `world` ranks, by default with a model that is not trained itself."""
    model = teams.models[MODEL]
    settings = {"frozen": True, "micro_batch_tokens": 40, **TRAINER, **trainer}
    config = TrainerConfig(device="cpu", ranks=world, collective_timeout_s=HANG_S, **settings)
    spec = RoleSpec("policy", config, model, {"loss": Objective(AlgorithmConfig())})
    dispatch = WorkerDispatch([spec], {"trainer": TeamRanks(teams.of(world), model)})
    try:
        await dispatch.start()
        yield dispatch["policy"]
    finally:
        await dispatch.close()


def run(use: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def in_time() -> Any:
        async with asyncio.timeout(HANG_S):
            return await use()

    return asyncio.run(in_time())


def begin(role: Role, call: Call) -> asyncio.Task[Any]:
    method, adapter, number = call
    if method == "optim_step":
        return role.optim_step(adapter, PARAMS[adapter])
    both = MiniBatch.of(*(make_batch(each) for each in (number - number % 2, number - number % 2 + 1)))
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


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Everything that was written about an adapter, moments included."""
    found = {}
    for path in directory.glob("*.safetensors"):
        found |= {f"{path.stem}|{key}": tensor for key, tensor in load_file(path).items()}
    return found


async def written(role: Role, adapter: str, directory: Path) -> dict[str, torch.Tensor]:
    await role.export_adapter(directory, adapter, with_optimizer=True)
    return tensors_of(directory)


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


async def interleaved(role: Role, coordinator: Coordinator, directory: Path, seed: int) -> dict[str, list[float]]:
    """Take the steps of all adapters, in any order; publish each after its step, and write into `directory` what it is by then.

    Nothing waits for a version to arrive but the next one. Returns the gradient norms by adapter.
    """
    rng, left = random.Random(seed), {name: steps(name) for name in CONFIGS}
    answers: dict[str, list[asyncio.Task[Any]]] = {name: [] for name in CONFIGS}
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
    assert all([result.step for result in each] == [1, 2, 3] for each in results.values())
    return {name: [result.grad_norm for result in each] for name, each in results.items()}


@pytest.mark.parametrize(("world", "settings"), LAYOUTS)
def test_adapters_end_as_if_alone_whatever_is_interleaved_and_published(
    teams: Teams, world: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Each publication is, bit for bit, PEFT's files padded with zeros."""
    norms: dict[str, list[float]] = {}
    wanted = {}

    async def alone(name: str) -> None:
        async with opened(teams, world, **settings) as role:
            assert await role.add_adapter(name, CONFIGS[name]) == 0
            norms[name] = await train(role, name)
            wanted[name] = await written(role, name, tmp_path / name)

    async def together() -> None:
        async with opened(teams, world, lora=CARRIER, **settings) as role:
            for name, config in CONFIGS.items():
                await role.add_adapter(name, config)
            await role.export_adapter(tmp_path / "carrier", "default", with_optimizer=True)
            assert not (tmp_path / "carrier/optimizer.safetensors").exists(), "it only travels"
            carrier = load_file(tmp_path / "carrier/adapter_model.safetensors")
            async with publishing(role, carrier) as (coordinator, keeper):
                assert await interleaved(role, coordinator, tmp_path, seed=world) == norms
            assert len(keeper.versions) == STEPS * len(CONFIGS)
            for version, tensors in keeper.versions.items():
                assert_same(tensors, padded(tmp_path / f"{version}", carrier))
            for name in CONFIGS:
                assert_same(await written(role, name, tmp_path / f"{name} together"), wanted[name])

    for name in CONFIGS:
        run(lambda name=name: alone(name))
    run(together)
    assert all(tensor.any() for key, tensor in wanted["a"].items() if "lora_B" in key)


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        *LAYOUTS[:-1],
        pytest.param(2, {"fsdp2": {"packing": "off"}, "activation_checkpointing": True}, id="fsdp2-2, padded"),
    ],
)
def test_parts_of_several_adapters_are_computed_together_as_separately(
    teams: Teams, world: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Each way is within 1e-6 of exact gradients, so both are within 2e-6 of each other.

    Adapters have different layers and ranks, or one rank and different lengths; there are more micro-batches than one, and ranks
    without a sequence of some.
    """
    adapters = {**CONFIGS, "c": LoraConfig(rank=3, seed=2), "d": LoraConfig(rank=3, alpha=2, seed=3)}
    batches = {name: make_batch(number) for number, name in enumerate(adapters)}
    for name, rows in zip(adapters, [(0,), (1, 2), (3,), (4, 0)], strict=True):
        batches[f"small {name}"] = TokenBatch(tuple(batches[name].sequences[row] for row in rows))
    rounds = [("", "a", "b", "c", "d"), ("small ", "a", "c", "d"), ("small ", "c", "d"), ("", "b", "d")]

    async def take(way: str, take_round: Callable[..., Coroutine[Any, Any, Any]]) -> dict[str, Any]:
        found = {}
        async with opened(teams, world, **settings) as role:
            for name, config in {**adapters, "wrong": CARRIER, "large": LoraConfig(rank=3)}.items():
                await role.add_adapter(name, config)
            for number, (size, *names) in enumerate(rounds):
                answers = await take_round(role, {name: batches[size + name] for name in names})
                for name, (answer, step) in zip(names, answers, strict=True):
                    tensors = await written(role, name, tmp_path / f"{way} {number} {name}")
                    found[f"{number} {name}"] = (answer, step.grad_norm, tensors)
        return found

    wanted, found = (run(lambda way=way: take(*way)) for way in (("alone", separately), ("joined", together)))
    assert found.keys() == wanted.keys()
    for key, (answer, norm, tensors) in wanted.items():
        assert found[key][1] == pytest.approx(norm, rel=2e-6)
        assert found[key][0].metrics == pytest.approx(answer.metrics, rel=1e-5, abs=1e-5)
        for one, other in zip(answer.outputs, found[key][0].outputs, strict=True):
            assert torch.allclose(one["logprobs"], other["logprobs"], rtol=0, atol=1e-5)
        for kind in ("exp_avg", "adapter_model"):
            pairs = [(tensors[name].double(), found[key][2][name]) for name in tensors if kind in name.split("|")]
            difference, size = (
                sum(float(each.square().sum()) for each in tensors)
                for tensors in ([one - other for one, other in pairs], [one for one, _ in pairs])
            )
            assert size > 0
            assert difference <= (2e-6) ** 2 * size


# Moments that are the gradient and its square, and steps that do not make much of what is next to 0.
GRADIENTS = AdamParams(1e-3, betas=(0.0, 0.9), eps=0.1, max_grad_norm=math.inf)


async def separately(role: Role, batches: Mapping[str, TokenBatch]) -> list[tuple[Any, StepResult]]:
    """A pass and a step of each adapter, one after the other."""
    return [
        (await role.forward_backward(batch, sft, None, LOGPROBS, name), await role.optim_step(name, GRADIENTS))
        for name, batch in batches.items()
    ]


async def together(role: Role, batches: Mapping[str, TokenBatch]) -> list[tuple[Any, Any]]:
    """As `separately`, in two calls, which have two more parts: one is refused, and one computes with infinite numbers."""
    unknown = batch_of([Sample((1,), (9999, 3), (-4.0, -4.0), 1.0)] * 4)
    parts = [BackwardPart(batch, sft, None, LOGPROBS, name) for name, batch in batches.items()]
    large = make_batch(9)
    large = large.with_values(WEIGHTS, [torch.full((each.length,), 3e38) for each in large.sequences])
    wrong = [BackwardPart(unknown, sft, adapter="wrong"), BackwardPart(large, sft, adapter="large")]
    refused, _, *answers = await role.together([*wrong, *parts])
    assert isinstance(refused, ProtocolError)
    assert "9999" in str(refused)
    wrong_steps = [StepPart("wrong"), StepPart("large", GRADIENTS)]
    refused, skipped, *stepped = await role.together([*wrong_steps, *(StepPart(name, GRADIENTS) for name in batches)])
    assert isinstance(skipped, StepResult)
    assert "gradient norm of 'large' is" in skipped.skipped
    assert isinstance(refused, ProtocolError)
    assert "a part of the mini-batch has no gradient" in str(refused)
    return list(zip(answers, stepped, strict=True))


def test_a_mini_batch_that_fails_or_has_no_finite_gradient_leaves_those_of_other_adapters(
    teams: Teams, tmp_path: Path
) -> None:
    unknown_token = batch_of([Sample((1,), (9999, 3), (-4.0, -4.0), 1.0)] * 4)
    both = MiniBatch.of(make_batch(0), make_batch(1))
    too_large = batch_of([Sample((1,), (2, 3), (-4.0, -4.0), 3e38)] * 4)

    async def alone() -> Any:
        async with opened(teams, 2) as role:
            for name, config in CONFIGS.items():
                await role.add_adapter(name, config)
            norms = {name: await train(role, name, 0, 1) for name in CONFIGS}
            return norms, {name: await written(role, name, tmp_path / f"{name} alone") for name in CONFIGS}

    async def with_failures() -> Any:
        async with opened(teams, 2) as role:
            for name, config in CONFIGS.items():
                await role.add_adapter(name, config)
            first = await written(role, "a", tmp_path / "first")
            calls = steps("b", 0, 1)
            await begin(role, calls[0])
            await begin(role, steps("a")[0])
            with pytest.raises(ProtocolError, match="9999"):
                await role.forward_backward(unknown_token, "loss", both, adapter="a")
            with pytest.raises(ProtocolError, match=r"a part of the mini-batch has no gradient: .*9999"):
                await begin(role, steps("a")[1])
            with pytest.raises(ProtocolError, match=r"a part of the mini-batch has no gradient: .*9999"):
                await role.optim_step("a", PARAMS["a"])
            await role.forward_backward(too_large, "loss", adapter="a")
            skipped = await role.optim_step("a", PARAMS["a"])
            assert (skipped.step, skipped.grad_norm) == (0, 0.0)
            assert "gradient norm of 'a'" in skipped.skipped
            assert_same(await written(role, "a", tmp_path / "still"), first)
            await begin(role, calls[1])
            norms = {"b": [(await begin(role, calls[2])).grad_norm]}
            norms["a"] = await train(role, "a", 0, 1)
            return norms, {name: await written(role, name, tmp_path / f"{name} after") for name in CONFIGS}

    (norms, wanted), (found_norms, found) = run(alone), run(with_failures)
    assert found_norms == norms
    for name in CONFIGS:
        assert_same(found[name], wanted[name])


def test_an_adapter_resumes_its_optimizer_or_begins_a_fresh_one_and_replaces_one_of_its_name(
    teams: Teams, tmp_path: Path
) -> None:
    async def use() -> None:
        config = CONFIGS["a"]
        async with opened(teams, 2) as role:
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


@pytest.mark.skipif(not peft_oracle.PEFT.is_dir(), reason="PEFT is not installed (see .ci/setup-env)")
def test_outputs_are_those_of_peft_with_the_adapter_that_is_named(teams: Teams, oracle: Ranks, tmp_path: Path) -> None:
    model, rows = teams.models[MODEL], 5
    oracle.all("make", model=model, directory=tmp_path / "a", seed=0, r=4, lora_alpha=6)

    async def use() -> None:
        async with opened(teams, 2, lora=CARRIER) as role:
            await role.add_adapter("a", LoraConfig(rank=4, alpha=6), tmp_path / "a")
            for adapter, directory in (("a", tmp_path / "a"), ("", None), (None, None)):
                (wanted,) = oracle.all("logprobs", model=model, adapter=directory, rows=rows)
                outputs = await role.forward(make_batch(0, rows), adapter=adapter)
                for row, sample in enumerate(make_samples(0, rows)):
                    found = outputs[row]["logprobs"][len(sample.prompt_ids) - 1 :]
                    assert np.allclose(found.numpy(), wanted[row], atol=1e-5)

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
        async with opened(teams, 2, lora=small) as role:
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
        async with opened(teams, 2, lora=CARRIER, frozen=False) as role:
            await role.add_adapter("a", CONFIGS["a"])
            await role.forward_backward(make_batch(0), "loss")
            assert (await role.optim_step()).step == 1
            async with publishing(role, carrier):
                await refused(role, "a", "in the place of 'default', which is trained itself")
        for lora in (None, LoraConfig()):
            async with opened(teams, 2, lora=lora, frozen=False) as role:
                await role.add_adapter("a", CONFIGS["a"])
                async with publishing(role, checkpoint(teams.models[MODEL])):
                    await refused(role, "a", "'a' cannot be published as an adapter, since versions are weights")
                await role.forward_backward(make_batch(0), "loss")
                step = role.optim_step(None, PARAMS["a"])
                if lora is not None:
                    assert (await step).step == 1
                    continue
                with pytest.raises(ConfigError, match="was given the settings of an adapter's step"):
                    await step

    run(use)
