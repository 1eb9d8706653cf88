"""A manifest that does not fit the receiver's model is refused before a byte moves, with every reason at once."""

from __future__ import annotations

import pytest
import torch

from weightlane.ckpt_engines import ManifestError
from weightlane.sync import Expectation, ExpectedTensor, Manifest, TensorSpec, check_coverage

F32, BF16 = torch.float32, torch.bfloat16
EXPECTED = Expectation(
    {
        "embed": ExpectedTensor((10, 4), frozenset({F32})),
        "q_proj": ExpectedTensor((4, 4), frozenset({F32, BF16})),
        "norm": ExpectedTensor((), frozenset({F32})),
    },
    tied={"lm_head": "embed"},
)
GOOD = {"embed": ((10, 4), F32), "q_proj": ((4, 4), BF16), "norm": ((), F32)}


def check(tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    specs = tuple(TensorSpec(name, shape, dtype) for name, (shape, dtype) in tensors.items())
    check_coverage(Manifest(5, specs, 64), EXPECTED, part="rollout-0/0")


def test_an_exact_manifest_is_accepted_with_and_without_the_tied_alias() -> None:
    check(GOOD)
    check(GOOD | {"lm_head": ((10, 4), F32)})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm": None}, "missing norm"),
        ({"embed": None, "lm_head": ((10, 4), F32)}, "missing embed"),
        ({"bias": ((4,), F32)}, "unexpected bias"),
        ({"q_proj": None, "qkv_proj": ((12, 4), F32)}, r"missing q_proj; unexpected qkv_proj \(these look fused"),
        ({"embed": ((12, 4), F32)}, r"embed has shape \[12, 4\], expected \[10, 4\] \(padded rows"),
        ({"q_proj": ((4, 5), F32)}, r"q_proj has shape \[4, 5\], expected \[4, 4\]"),
        ({"embed": ((10, 4), BF16)}, "embed is bfloat16, expected float32"),
        ({"lm_head": ((9, 4), F32)}, r"lm_head has shape \[9, 4\]"),
    ],
)
def test_each_kind_of_disagreement_is_named(
    change: dict[str, tuple[tuple[int, ...], torch.dtype] | None], says: str
) -> None:
    tensors = {name: value for name, value in (GOOD | change).items() if value is not None}
    with pytest.raises(ManifestError, match=says) as caught:
        check(tensors)
    assert caught.value.part == "rollout-0/0"
