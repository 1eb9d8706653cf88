"""How much has changed is told from a small part of it."""

from __future__ import annotations

import pytest
import torch

from weightlane.sync import LocalShard, TensorSpec
from weightlane.sync.codecs.delta.encoding import DeltaEncoder
from weightlane.sync.version.packing import compact_places


def encoder_of(tensors: list[torch.Tensor]) -> tuple[DeltaEncoder, torch.Tensor]:
    """Return a delta encoder of live `tensors`, and a snapshot of their current values."""
    specs = [TensorSpec(str(number), tuple(tensor.shape), tensor.dtype) for number, tensor in enumerate(tensors)]
    shards = [LocalShard.whole(spec, tensor) for spec, tensor in zip(specs, tensors, strict=True)]
    places = compact_places(shards)
    base = torch.zeros(sum(shard.nbytes for shard in shards) + 64 * len(shards), dtype=torch.uint8)
    for place, shard in zip(places, shards, strict=True):
        base[place : place + shard.nbytes].copy_(shard.data.view(torch.uint8))
    return DeltaEncoder(shards, places), base


@pytest.mark.parametrize("sizes", [[3_000_000, 1_000_001, 7], [2048] * 1500, [5]])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
def test_the_share_is_about_right_in_large_tensors_and_in_many_small_ones(sizes: list[int], density: float) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(size).to(torch.bfloat16) for size in sizes]
    encoder, base = encoder_of(tensors)
    changed = 0
    for tensor in tensors:
        changes = torch.rand(tensor.shape) < density
        tensor.view(torch.int16).add_(changes.to(torch.int16))
        changed += int(changes.sum())
    assert encoder.sampled_density(base) == pytest.approx(changed / sum(sizes), rel=0.1)


def test_a_change_is_any_bit() -> None:
    tensors = [torch.zeros(1000), torch.full((1000,), float("nan"))]
    encoder, base = encoder_of(tensors)
    assert encoder.sampled_density(base) == 0.0
    tensors[0].fill_(-0.0)
    assert encoder.sampled_density(base) == 0.5
    tensors[1].view(torch.int32).add_(1)
    assert encoder.sampled_density(base) == 1.0
