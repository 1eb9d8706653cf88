"""Deltas on a device: bit for bit what the CPU makes of the same tensors."""

from __future__ import annotations

import pytest
import torch

from weightlane.sync.codecs.delta.format import decode, encode, encoder
from weightlane.sync.codecs.delta.format.encoder import Encoded
from weightlane.sync.codecs.delta.format.wire_format import BLOCK


def test_a_device_and_the_cpu_write_the_same_delta() -> None:
    """From positions and flips that a device compacted, or from a mask: gaps, bitmaps and no change."""
    numel = 3 * BLOCK + 77
    share = torch.tensor([0.001, 0.0, 0.4, 1.0]).repeat_interleave(BLOCK)[:numel]
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(0, 2**15, (numel,), dtype=torch.int16, generator=generator)
    new = old ^ (torch.rand(numel, generator=generator) < share).short()
    direct = encode(old, new)
    assert isinstance(direct, Encoded)
    changes_in = encoder._on_device(old, new, old != new)
    parts = []
    for start in range(0, numel, BLOCK):
        stop = min(start + BLOCK, numel)
        parts += encoder._block(changes_in(start, stop), stop - start)
    assert [part.tobytes() for part in parts] == [part.tobytes() for part in direct.parts[1:]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_on_a_gpu_the_delta_is_the_same_and_goes_in_and_out(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    numel = 3 * BLOCK + 5
    old = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    new = old.clone()
    new.view(torch.uint8).view(numel, -1)[torch.rand(numel) < 0.01, 0] ^= 1
    here, there = encode(old, new), encode(old.cuda(), new.cuda())
    assert isinstance(here, Encoded)
    assert isinstance(there, Encoded)
    assert torch.equal(here.to_bytes(), there.to_bytes())
    patch = decode(there.to_bytes(), elements=numel, itemsize=dtype.itemsize).to("cuda")
    held = old.cuda()
    patch.flip_(held)
    assert torch.equal(held.cpu().view(torch.uint8), new.view(torch.uint8))
    patch.flip_(held)
    assert torch.equal(held.cpu().view(torch.uint8), old.view(torch.uint8))
