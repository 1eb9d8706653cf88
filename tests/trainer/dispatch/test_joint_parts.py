"""Calls of several adapters that are made together have the results of separate ones, and each its own error."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_roles import CARRIER, CONFIGS, LAYOUTS, opened, run, written
from engine_batches import Sample, batch_of, make_batch
from engine_ranks import Teams, exhaustive

from weightlane.ckpt_engines import ProtocolError
from weightlane.trainer.config import LoraConfig
from weightlane.trainer.data.batch import TokenBatch
from weightlane.trainer.data.step_result import StepResult
from weightlane.trainer.dispatch.role import Role
from weightlane.trainer.engines.contract import ForwardBackward, OptimStep
from weightlane.trainer.engines.lora.adapter import LoraPair
from weightlane.trainer.engines.lora.joint import JointPairs
from weightlane.trainer.engines.lora.sites import LoraSite
from weightlane.trainer.engines.optimizers.settings import AdamParams
from weightlane.trainer.objectives.loss import LOGPROBS
from weightlane.trainer.objectives.supervised import WEIGHTS, sft

PADDED = exhaustive({"fsdp2": {"packing": "off"}, "activation_checkpointing": True}, id="fsdp2-2, padded")


@pytest.mark.parametrize("settings", [*LAYOUTS, PADDED])
def test_parts_of_several_adapters_are_computed_together_as_separately(
    teams: Teams, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Each way is within 1e-6 of exact gradients, so both are within 2e-6 of each other.

    Adapters have different layers and ranks, or one rank and different lengths; there are more micro-batches than one, and ranks
    without a sequence of some.
    """
    adapters = {**CONFIGS, "c": LoraConfig(rank=3, seed=2), "d": LoraConfig(rank=3, alpha=2, seed=3)}
    batches = {name: make_batch(number) for number, name in enumerate(adapters)}
    for name, rows in (("c", (3,)), ("d", (4, 0))):
        batches[f"small {name}"] = TokenBatch(tuple(batches[name].sequences[row] for row in rows))
    rounds = [("", "a", "b", "c", "d"), ("small ", "c", "d")]

    async def take(way: str, take_round: Callable[..., Coroutine[Any, Any, Any]]) -> dict[str, Any]:
        found = {}
        async with opened(teams, micro_batch_tokens=90, **settings) as role:
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
        joint = found[key][0].metrics
        computed = {name: joint[name] for name in ("packed_tokens",) if name in joint}  # depends on what is joined
        assert joint == pytest.approx({**answer.metrics, **computed}, rel=1e-5, abs=1e-5)
        assert joint.get("packed_tokens", 0) <= joint.get("read_tokens", 0)
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
    # Half precision has no number for this scale, which both ways multiply by before they round.
    thirds = LoraPair(
        LoraSite("q", 3, 3, (0, 3), (0, 3)), {each: torch.nn.Parameter(torch.eye(3)) for each in "AB"}, 16 / 3
    )
    inputs = torch.arange(12).view(4, 3).bfloat16()
    assert torch.equal(JointPairs([(thirds, 2), (thirds, 2)]).added(inputs), thirds.added(inputs))


# Moments that are the gradient and its square, and steps that do not make much of what is next to 0.
GRADIENTS = AdamParams(1e-3, betas=(0.0, 0.9), eps=0.1, max_grad_norm=math.inf)


async def separately(role: Role, batches: Mapping[str, TokenBatch]) -> list[tuple[Any, StepResult]]:
    """A pass and a step of each adapter, one after the other."""
    return [
        (await role.forward_backward(batch, sft, None, LOGPROBS, name), await role.optim_step(name, GRADIENTS))
        for name, batch in batches.items()
    ]


async def together(role: Role, batches: Mapping[str, TokenBatch]) -> list[tuple[Any, Any]]:
    """The calls of `separately` as two, which have two more parts: one is refused, and one computes with infinite numbers."""
    unknown = batch_of([Sample((1,), (9999, 3), (-4.0, -4.0), 1.0)] * 4)
    parts = [ForwardBackward(batch, sft, None, LOGPROBS, name) for name, batch in batches.items()]
    large = make_batch(9)
    large = large.with_values(WEIGHTS, [torch.full((each.length,), 3e38) for each in large.sequences])
    wrong = [ForwardBackward(unknown, sft, adapter="wrong"), ForwardBackward(large, sft, adapter="large")]
    refused, _, *answers = await role.together([*wrong, *parts])
    assert isinstance(refused, ProtocolError)
    assert "9999" in str(refused)
    wrong_steps = [OptimStep("wrong"), OptimStep("large", GRADIENTS)]
    refused, skipped, *stepped = await role.together([*wrong_steps, *(OptimStep(name, GRADIENTS) for name in batches)])
    assert isinstance(skipped, StepResult)
    assert "gradient norm of 'large' is" in skipped.skipped
    assert isinstance(refused, ProtocolError)
    assert "a part of the mini-batch has no gradient" in str(refused)
    return list(zip(answers, stepped, strict=True))
