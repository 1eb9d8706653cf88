"""Tracing follows every copy of a loader and refuses, by name, whatever is more than a copy; live weights are never touched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from bits import bits
from deltas import delta_between
from hypothesis import given
from hypothesis import strategies as st
from layout_models import random_bits

from weightlane.ckpt_engines import CommitError, DeltaBaseError
from weightlane.rollout.layout.map.coverage import Reads, target_coverage, unused_elements
from weightlane.rollout.layout.map.layout_map import LayoutMap, SourceSpec
from weightlane.rollout.layout.trace.trace import trace_loading
from weightlane.rollout.layout.write.commit_plan import CommitPlan
from weightlane.rollout.layout.write.live_delta import LiveDelta

Loader = Callable[[torch.nn.Parameter, torch.Tensor], Any]
A = {"a": SourceSpec((6, 8), torch.float32)}


class Model(torch.nn.Module):
    """One parameter, and a loader for every tensor that comes."""

    def __init__(self, loader: Loader, shape: Iterable[int] = (6, 8), dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(random_bits(tuple(shape), dtype, seed=9), requires_grad=False)
        self.aside = torch.zeros(6, 8)
        self.loader = loader

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for _, tensor in weights:
            self.loader(self.w, tensor)
        return {"w"}


def unused(layouts: Iterable[LayoutMap]) -> dict[str, int]:
    """The unused elements, by what ranks tell each other."""
    told = [json.loads(json.dumps(Reads.of(layout).to_plain())) for layout in layouts]
    return unused_elements(A, [Reads.from_plain(plain) for plain in told])


def planned(model: Model, spec: SourceSpec) -> CommitPlan:
    """The plan of a model that takes a tensor ``a``. Live weights are left alone."""
    before = bits(model.w)
    layout = trace_loading(model, {"a": spec})
    assert torch.equal(bits(model.w), before)
    assert not [*layout.refused_targets, *layout.refused_sources]
    (counts,) = target_coverage(layout).values()
    assert (counts.unmapped, counts.doubled) == (0, 0)
    return CommitPlan(layout, model)


def check_followed(model: Model, old: torch.Tensor, new: torch.Tensor) -> None:
    """Versions that come whole, in pieces or as single elements leave what the loader leaves, and old elements undo new ones."""
    plan = planned(model, SourceSpec(tuple(old.shape), old.dtype))
    model.load_weights([("a", old.clone())])
    wanted = bits(model.w)
    plan.commit({"a": new})
    plan.commit({"a": old})
    assert torch.equal(bits(model.w), wanted)
    for length in (5, 1000):
        plan.commit({"a": new})
        plan.fill()
        for start in range(0, old.numel(), length):
            plan.write_elements("a", start, old.view(-1)[start : start + length].clone())
        assert torch.equal(bits(model.w), wanted), length
    positions = torch.randperm(old.numel(), generator=torch.Generator().manual_seed(4))[: old.numel() // 3]
    changed = old.view(-1).index_copy(0, positions, new.view(-1)[positions]).view(old.shape)
    if model.w.dtype != old.dtype:
        old, changed = old.nan_to_num(), changed.nan_to_num()
    plan.commit({"a": changed})
    after = bits(model.w)
    plan.commit({"a": old})
    delta = LiveDelta(plan, delta_between("a", old, changed), lambda: None)
    for wanted in (after, bits(model.w)):
        delta.swap()
        assert torch.equal(bits(model.w), wanted)
    assert plan.keeps_sent_bits


def through_a_buffer(w: torch.nn.Parameter, t: torch.Tensor) -> None:
    buffer = torch.zeros(6, 8)
    buffer[:3].copy_(t[3:])
    buffer[3:].copy_(t[:3])
    w.data.copy_(buffer)


def filled_then_copied(w: torch.nn.Parameter, t: torch.Tensor) -> None:
    w.data.zero_()
    w.data[:4].copy_(t)


def padded(w: torch.nn.Parameter, t: torch.Tensor) -> None:
    w[: t.shape[0]].data.copy_(t)
    w[t.shape[0] :].data.fill_(-0.0)


COPIES: dict[str, tuple[Loader, tuple[int, ...], torch.dtype]] = {
    "by index": (lambda w, t: w.data.__setitem__(slice(None), t), (6, 8), torch.float32),
    "halves swapped": (lambda w, t: w.data.copy_(torch.cat([t[3:], t[:3]])), (6, 8), torch.float32),
    "rows by an index": (lambda w, t: w.data.copy_(t[torch.tensor([5, 3, 1, 0, 2, 4])]), (6, 8), torch.float32),
    "upside down": (lambda w, t: w.data.copy_(t.flip(0)), (6, 8), torch.float32),
    "through a buffer": (through_a_buffer, (6, 8), torch.float32),
    "a row for all": (lambda w, t: w.data.copy_(t), (8,), torch.float32),
    "rows repeated": (lambda w, t: w.data.copy_(t.repeat_interleave(2, 0)), (3, 8), torch.float32),
    "padding rows": (padded, (4, 8), torch.float32),
    "zeroed first": (filled_then_copied, (4, 8), torch.float32),
    "cast while copying": (lambda w, t: w.data.copy_(t), (6, 8), torch.bfloat16),
    "cast before": (lambda w, t: w.data.copy_(t.to(w.dtype)), (6, 8), torch.bfloat16),
}


@pytest.mark.parametrize("case", COPIES)
def test_a_loader_that_copies_is_followed_bit_for_bit_however_a_version_comes(case: str) -> None:
    loader, shape, dtype = COPIES[case]
    check_followed(Model(loader), random_bits(shape, dtype, seed=1), random_bits(shape, dtype, seed=2))


def test_a_delta_is_refused_where_live_bits_do_not_tell_what_was_sent() -> None:
    assert not planned(Model(lambda w, t: w.data.copy_(t), dtype=torch.bfloat16), A["a"]).keeps_sent_bits
    for dtype in (torch.bfloat16, torch.float16):
        plan = planned(Model(lambda w, t: w.data.copy_(t)), SourceSpec((6, 8), dtype))
        old = torch.full((6, 8), torch.nan, dtype=dtype)
        plan.commit({"a": old})
        with pytest.raises(DeltaBaseError, match=r"a holds values in torch\.float32 that do not tell"):
            LiveDelta(plan, delta_between("a", old, old.nan_to_num()), lambda: None)


def rearranged(tensor: torch.Tensor, choices: Random) -> torch.Tensor:
    """Apply a random chain of views and copies to `tensor`."""
    for _ in range(choices.randrange(7)):
        axis = choices.randrange(tensor.ndim)
        match choices.choice(["permute", "narrow", "step", "copy", "copy", "split", "join", "cast"]):
            case "permute":
                tensor = tensor.permute(choices.sample(range(tensor.ndim), tensor.ndim))
            case "narrow":
                start = choices.randrange(tensor.size(axis))
                tensor = tensor.narrow(axis, start, choices.randint(1, tensor.size(axis) - start))
            case "step":
                tensor = tensor[(slice(None),) * axis + (slice(choices.randrange(tensor.size(axis)), None, 2),)]
            case "copy":
                tensor = tensor.clone(memory_format=torch.contiguous_format) if axis else tensor.clone()
            case "split":
                tensor = tensor.unflatten(axis, (-1, 2 if tensor.size(axis) % 2 == 0 else 1))
            case "join":
                tensor = tensor.flatten(0, 1) if tensor.ndim > 1 else tensor
            case "cast":
                tensor = tensor.to(torch.bfloat16)
    return tensor


@given(st.integers(0, 1 << 32))
def test_any_chain_of_views_and_copies_is_followed(seed: int) -> None:
    old, new = (random_bits((4, 6, 8), torch.bfloat16, seed=seed % 7 + more) for more in (0, 7))
    shape = rearranged(old, Random(seed)).shape
    model = Model(lambda w, t: w.data.copy_(rearranged(t, Random(seed))), shape, torch.bfloat16)
    check_followed(model, old, new)


COMPUTED: dict[str, tuple[Loader, str]] = {
    "one is added": (lambda w, t: w.data.copy_(1 + t), "transformed (add)"),
    "added afterwards": (lambda w, t: (w.data.copy_(t), w.data.add_(1)), "changed in place (add_)"),
    "minus exp of itself": (lambda w, t: (w.data.copy_(t), w.data.copy_(-torch.exp(w.float()))), "reads it back"),
    "doubled in place": (lambda w, t: w.data.copy_(t.mul_(2)), "transformed (mul_)"),
    "cast there and back": (
        lambda w, t: w.data.copy_(t.to(torch.bfloat16).to(torch.float32)),
        "is cast to torch.bfloat16 before it is copied",
    ),
    "zeroed in part": (lambda w, t: (t[:3].zero_(), w.data.copy_(t)), "transformed (zero_)"),
    "bits of another type": (lambda w, t: w.data.copy_(t.view(torch.int32)), "bits of torch.float32 are read as"),
    "a look at the data": (lambda w, t: w.data.copy_(t if bool((t > 0).any()) else -t), "needs its values"),
    "by way of numpy": (lambda w, t: w.data.copy_(torch.from_numpy(t.numpy())), "needs its values"),
    "another tensor": (lambda w, t: setattr(w, "data", t.clone()), ""),
    "padding in the middle": (lambda w, t: w.data.copy_(F.pad(t[:, :6], (1, 1))), "filled with something"),
    "a constant on top": (lambda w, t: (w.data.copy_(t), w.data[2:3].fill_(3.0)), "constant after it was loaded"),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_a_loader_that_does_more_than_copy_is_refused_by_name(case: str) -> None:
    loader, why = COMPUTED[case]
    model = Model(loader)
    before, storage = bits(model.w), model.w.data_ptr()
    layout = trace_loading(model, A)
    (refusal,) = [*layout.refused_targets, *layout.refused_sources][:1]
    assert refusal.tensor in {"a", "w"}
    assert why in refusal.why
    assert model.w.data_ptr() == storage
    assert torch.equal(bits(model.w), before)
    if case == "one is added":
        assert layout.feeds == [("a", "w")], "what a refused parameter is made of"


def test_a_tensor_that_is_zeroed_before_it_is_loaded_leaves_zeros_and_nothing_of_it_is_sent() -> None:
    """So that what ranks add up has a bias once."""
    model = Model(lambda w, t: (w.data[:4].copy_(t[:4]), w.data[4:].copy_(t.zero_()[4:])))
    layout = trace_loading(model, A)
    assert not [*layout.refused_targets, *layout.refused_sources]
    assert unused([layout]) == {"a": 16}
    tensor = random_bits((6, 8), torch.float32, seed=1)
    CommitPlan(layout, model).commit({"a": tensor})
    assert torch.equal(bits(model.w[:4]), bits(tensor[:4]))
    assert not model.w[4:].any()


def test_what_is_kept_where_nobody_looks_or_replaced_is_refused_and_put_back() -> None:
    model = Model(lambda w, t: None)
    model.loader = lambda w, t: (w.data.copy_(t), model.aside.copy_(t))
    (refusal,) = trace_loading(model, A).refused_sources
    assert refusal.tensor == "a"
    assert "neither parameter nor buffer" in refusal.why
    assert not model.aside.any()
    model.loader = lambda w, t: (w.data.copy_(t), setattr(model, "aside", t))
    aside = model.aside
    (refusal,) = trace_loading(model, A).refused_targets
    assert refusal.tensor == "aside"
    assert model.aside is aside


def test_coverage_counts_what_is_missing_doubled_and_unused() -> None:
    twice = trace_loading(Model(lambda w, t: w.data.copy_(t)), dict.fromkeys("ab", A["a"]))
    assert target_coverage(twice)["w"].doubled == 48
    half = trace_loading(Model(lambda w, t: w.data[:3].copy_(t[:3])), A)
    assert target_coverage(half)["w"].unmapped == 24
    assert unused([half]) == {"a": 24}
    other = trace_loading(Model(lambda w, t: w.data[:3].copy_(t[3:])), A)
    assert unused([half, other]) == {}


def test_what_is_not_as_it_was_traced_is_refused_before_anything_is_copied_and_memory_that_moved_is_noticed() -> None:
    model = Model(lambda w, t: w.data.copy_(t))
    plan, before = planned(model, A["a"]), bits(model.w)
    good = torch.zeros(6, 8)
    for tensors in ({}, {"a": good.bfloat16()}, {"a": torch.zeros(8, 6)}, {"a": torch.zeros(8, 6).t()}):
        with pytest.raises(CommitError, match="a"):
            plan.commit(tensors)
    for start, values in ((0, torch.zeros(1, dtype=torch.int8)), (48, torch.zeros(1))):
        with pytest.raises(CommitError, match="of a do not go by copies"):
            plan.write_elements("a", start, values)
    for positions in (torch.tensor([5, 3]), torch.tensor([3, 3]), torch.tensor([-1, 3]), torch.tensor([3, 48])):
        with pytest.raises(CommitError, match="between 0 and 47"):
            plan.locate("a", positions)
    with pytest.raises(CommitError, match="b does not go by copies"):
        plan.locate("b", torch.tensor([3, 5]))
    assert torch.equal(bits(model.w), before)
    assert not plan.moved()
    model.w.data = model.w.data.clone()
    assert plan.moved()
