"""`LocalShard` refuses data that is not a slice of the tensor it names, before a byte moves."""

from __future__ import annotations

import pytest
import torch

from weightlane.ckpt_engines import ManifestError
from weightlane.sync import LocalShard, TensorSpec

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
    run = LocalShard.run(SPEC, 2, torch.arange(3.0))
    assert [(shard.starts, shard.data.tolist()) for shard in run] == [((0, 2), [[0.0]]), ((1, 0), [[1.0, 2.0]])]
