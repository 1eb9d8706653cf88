"""A pass over tokens of several slots has the outputs and gradients of each slot alone, and ranks get equal shares of tokens."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_batches import make_samples
from transformers import AutoModelForCausalLM

from weightlane.trainer.config import LoraConfig, TrainerConfig
from weightlane.trainer.data.sequences import MicroBatch
from weightlane.trainer.engines.fsdp2.loading import decoder_layers
from weightlane.trainer.engines.fsdp2.lora import Fsdp2Adapted
from weightlane.trainer.engines.head import PassQuery
from weightlane.trainer.engines.hf.heads import HeadQuery, replace_head
from weightlane.trainer.engines.hf.layout import Layout
from weightlane.trainer.engines.hf.packed_attention import pack_attention
from weightlane.trainer.engines.lora.adapters import Adapters
from weightlane.trainer.user_program import BASE, ForwardInput
from weightlane.trainer.user_program.packed_pass import PassKind, by_slot, demand, filled_up, most_of
from weightlane.trainer.user_program.windows import parts_of, widest_window

SLOTS = {
    "a": LoraConfig(rank=2, alpha=5),
    "b": LoraConfig(rank=3, alpha=1, targets=("q_proj", "down_proj")),
    "c": LoraConfig(rank=3, alpha=4),
    "d": LoraConfig(rank=3, alpha=7),
}
Parts = list[tuple[str, list[int]]]


@pytest.fixture
def computed(models: dict[str, Path]) -> Any:
    """Computes parts, which are slots with numbers of samples; returns outputs by sample, and gradients by slot and layer."""
    model = AutoModelForCausalLM.from_pretrained(models["qwen2"], dtype=torch.float64).requires_grad_(False)
    pack_attention(model)
    replace_head(model)
    alone: Any = SimpleNamespace(tensor=None, data=SimpleNamespace(get_group=lambda: None), first_of_tensor=True)
    adapted = Fsdp2Adapted(model, decoder_layers(model), alone, ())
    adapters = Adapters(TrainerConfig(), adapted, 0, torch.device("cpu"))
    for name, config in SLOTS.items():
        adapters.keep(adapters.make(name, config, None))
        random_of = torch.Generator().manual_seed(ord(name))
        for parameter in adapters.chosen(name).parameters:
            parameter.data = torch.randn(parameter.shape, generator=random_of, dtype=torch.float64) * 0.1
    samples = make_samples(0)

    def compute(parts: Parts) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
        sequences = [[samples[row].sequence() for row in rows] for _, rows in parts]
        layout = Layout.packed([MicroBatch.of(each) for each in sequences], share=True)
        runs = list(zip([adapters.chosen(slot) for slot, _ in parts], layout.counts, strict=True))
        query = PassQuery(torch.empty(0, dtype=torch.int64), logprobs=False, hidden=True)
        with adapters.active_runs(runs):
            hidden = model(HeadQuery(query, layout.micro, layout.places), **layout.inputs)["hidden"]
        outputs = dict(zip([row for _, rows in parts for row in rows], layout.micro.split(hidden), strict=True))
        assert hidden.dtype == torch.float64
        loss = sum((row + 1) * each.sin().sum() for row, each in outputs.items())
        loss.backward()  # type: ignore[union-attr]  # there is a part
        found = {}
        for slot in {slot for slot, _ in parts if slot}:
            for module, pair in adapters.chosen(slot).pairs.items():
                found |= {f"{slot}|{module}|{name}": each.grad.clone() for name, each in pair.matrices.items()}
            adapters.chosen(slot).clear_gradients()
        return {row: each.detach() for row, each in outputs.items()}, found

    return compute


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(
            [("a", [0, 1, 2]), (BASE, [3]), ("b", [4]), ("a", [5])], id="other ranks and layers, one slot twice"
        ),
        pytest.param([("c", [0, 1, 2]), ("d", [4, 5])], id="alike, with stacked matrices"),
    ],
)
def test_outputs_and_gradients_are_those_of_each_slot_alone_in_float64(computed: Any, parts: Parts) -> None:
    outputs, gradients = computed(parts)
    alone: Parts = [
        (slot, [row for name, rows in parts if name == slot for row in rows]) for slot in dict(parts) if slot
    ]
    wanted = [computed([part]) for part in alone]
    for row, each in ((row, each) for found, _ in wanted for row, each in found.items()):
        assert torch.linalg.vector_norm(outputs[row] - each) < 1e-10 * torch.linalg.vector_norm(each)
    assert gradients.keys() == {name for _, found in wanted for name in found}
    for name, each in ((name, each) for _, found in wanted for name, each in found.items()):
        assert each.norm() > 0
        assert (gradients[name] - each).norm() < 1e-10 * each.norm()


def test_inputs_are_one_pass_for_each_kind_of_gradient_and_every_rank_has_the_same_kinds() -> None:
    own, one, two = ({"input_tokens": [1], "target_tokens": [2], "checkpoint": name} for name in (None, "one", "two"))
    inputs = [ForwardInput(**each) for each in (one, own, two, one)]
    inputs.append(ForwardInput(input_tokens=[1], top_k=2, checkpoint="two"))
    slots = [each.checkpoint or BASE for each in inputs]
    trained = [BASE, "one", "two"]
    joined = by_slot(inputs, slots, trained, joined=True)
    assert [(each.kind, each.slots, len(each.inputs)) for each in joined] == [
        (PassKind.BASE, (BASE,), 1),
        (PassKind.ADAPTERS, ("one", "two"), 3),
        (PassKind.NONE, ("two",), 1),
    ]
    apart = by_slot(inputs, slots, trained, joined=False)
    assert [(each.kind, each.slots) for each in apart] == [
        (PassKind.BASE, (BASE,)),
        (PassKind.ADAPTERS, ("one",)),
        (PassKind.ADAPTERS, ("two",)),
        (PassKind.NONE, ("two",)),
    ]
    (hidden,) = by_slot([ForwardInput(input_tokens=[1], hidden_states=True)], [BASE], trained, joined=True)
    most = most_of(demand(of_rank, by_slot=False) for of_rank in (joined, apart[1:3], [hidden]))
    filled = filled_up([hidden], most, "one", by_slot=False)
    assert [(each.kind, each.slots, each.head) for each in filled] == [
        (PassKind.BASE, (BASE,), True),
        (PassKind.ADAPTERS, ("one",), False),
        (PassKind.ADAPTERS, ("one",), False),
        (PassKind.NONE, (BASE,), False),
    ]
    assert filled[0].query(filled[0].packed()).logprobs, "another rank's head has a gradient"
    ranks = apart[1:2], apart[2:], [hidden]
    most = most_of(demand(of_rank, by_slot=True) for of_rank in ranks)
    for of_rank in ranks:
        found = filled_up(of_rank, most, "one", by_slot=True)
        assert [(each.kind, each.slots) for each in found] == [(each.kind, each.slots) for each in apart]
        assert [each for each in found if each.inputs] == list(of_rank)
    assert not by_slot(inputs, slots, [], joined=True)[0].gradient


def test_a_window_is_divided_by_tokens_in_order_and_grows_while_it_fits() -> None:
    random_of = random.Random(0)
    for world in (1, 2, 3, 4):
        for _ in range(50):
            tokens = [random_of.randint(1, 100) for _ in range(random_of.randint(1, 12))]
            parts = parts_of(tokens, world)
            assert [index for part in parts for index in part] == list(range(len(tokens)))
            most = max(sum(tokens[index] for index in part) for part in parts)
            assert most <= sum(tokens) / world + max(tokens)
    assert parts_of([90, 10, 10, 10, 10, 10, 10, 10, 10, 10], 2) == [range(1), range(1, 10)]
    assert parts_of([5, 5, 5, 5], 2) == [range(2), range(2, 4)]
    assert widest_window([9, 1, 1, 1, 8], [9, 1, 1, 1, 8], 2, 9) == 4
    assert widest_window([10], [10], 2, 9) == 0
