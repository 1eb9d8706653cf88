"""Manifests that do not fit the receiver's model, and shards that do not fit their tensor, are refused before a byte moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from weightlane.ckpt_engines import ManifestError
from weightlane.sync import Expectation, ExpectedTensor, LocalShard, Manifest, TensorSpec, check_coverage

F32, BF16 = torch.float32, torch.bfloat16
EXPECTED = Expectation(
    {
        "embed": ExpectedTensor((10, 4), frozenset({F32})),
        "q_proj": ExpectedTensor((4, 4), frozenset({F32, BF16})),
        "norm": ExpectedTensor((), frozenset({F32})),
    },
    tied={"lm_head": "embed"},
    unread=frozenset({"mask"}),
    place=lambda name: name.replace("decoder_norm", "norm").replace("final_norm", "norm"),
)
GOOD = {"embed": ((10, 4), F32), "q_proj": ((4, 4), BF16), "norm": ((), F32)}


def check(tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    specs = tuple(TensorSpec(name, shape, dtype) for name, (shape, dtype) in tensors.items())
    check_coverage(Manifest(5, specs, 64), EXPECTED, part="rollout-0/0")


@pytest.mark.parametrize(
    "names",
    [
        lambda name: name,
        lambda name: f"model.{name}",  # as a part of a larger model
        lambda name: name.replace("norm", "decoder_norm"),  # the model puts both into one place
    ],
)
@pytest.mark.parametrize(
    "more", [{}, {"mask": ((7,), torch.bool)}, {"model.layers.0.self_attn.rotary_emb.inv_freq": ((2,), F32)}]
)
def test_tensors_are_accepted_under_names_that_mean_the_same_and_with_others_that_no_rank_reads(
    names: Callable[[str], str], more: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    check({names(name): value for name, value in (GOOD | more).items()})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm": None}, "missing norm"),
        ({"embed": None, "lm_head": ((10, 4), F32)}, "missing embed"),
        ({"bias": ((4,), F32)}, "unexpected bias"),
        ({"norm": None, "decoder_norm": ((), F32), "final_norm": ((), F32)}, "missing norm; unexpected"),
        ({"norm": None, "model.norm": ((), F32), "other.norm": ((), F32)}, "unexpected other.norm"),
        ({"q_proj": None, "qkv_proj": ((12, 4), F32)}, r"missing q_proj; unexpected qkv_proj \(these look fused"),
        ({"embed": ((12, 4), F32)}, r"embed has shape \[12, 4\], expected \[10, 4\] \(padded rows"),
        ({"q_proj": ((4, 5), F32)}, r"q_proj has shape \[4, 5\], expected \[4, 4\]"),
        ({"embed": ((10, 4), BF16)}, "embed is bfloat16, expected float32"),
        ({"lm_head": ((10, 4), F32)}, "lm_head was sent as a tensor of its own, and is embed here"),
    ],
)
def test_each_kind_of_disagreement_is_named(
    change: dict[str, tuple[tuple[int, ...], torch.dtype] | None], says: str
) -> None:
    check(GOOD)
    tensors = {name: value for name, value in (GOOD | change).items() if value is not None}
    with pytest.raises(ManifestError, match=says) as caught:
        check(tensors)
    assert caught.value.part == "rollout-0/0"


SPEC = TensorSpec("proj.weight", (2, 3), torch.float32)


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 3, 1), (4, 3), ()])
def test_a_whole_tensor_has_the_shape_of_its_tensor(shape: tuple[int, ...]) -> None:
    with pytest.raises(ManifestError, match=r"proj.weight has shape \(2, 3\), and its data"):
        LocalShard.whole(SPEC, torch.zeros(shape))


@pytest.mark.parametrize(("starts", "shape"), [((1, 0), (2, 3)), ((0, -1), (2, 1)), ((0,), (2, 3)), ((0, 0), (6,))])
def test_a_slice_lies_within_its_tensor(starts: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(ManifestError, match=r"is no slice of proj.weight, whose shape is \(2, 3\)"):
        LocalShard(SPEC, starts, torch.zeros(shape))


def test_whole_numbers_are_not_taken_for_weights_nor_weights_for_whole_numbers() -> None:
    with pytest.raises(ManifestError, match="was declared float32, and its data is int64"):
        LocalShard.whole(SPEC, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ManifestError, match="was declared int64, and its data is bfloat16"):
        LocalShard.whole(TensorSpec("steps", (), torch.int64), torch.zeros((), dtype=torch.bfloat16))


def test_slices_of_any_strides_and_floating_point_type_are_taken() -> None:
    columns = torch.arange(6.0, dtype=torch.bfloat16).view(3, 2).T
    assert LocalShard.whole(SPEC, columns).data is columns
    assert LocalShard(SPEC, (0, 1), columns[:, 1:]).numel == 4
    assert LocalShard.nothing(SPEC, columns).numel == 0
