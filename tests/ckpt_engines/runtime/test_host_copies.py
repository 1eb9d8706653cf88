"""Host copies by libc and numpy write the same bits as torch."""

import pytest
import torch

from weightlane.ckpt_engines.runtime.tensor_bytes import copy_bytes, narrow_offsets, put_elements


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_elements_are_put_where_offsets_say(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, 127, (200_000,), generator=generator).to(dtype)
    shuffled = torch.randperm(target.numel(), generator=generator)
    for count in (0, 1, 70_001):
        offsets = shuffled[:count].sort().values
        values = torch.randint(0, 127, (count,), generator=generator).to(dtype)
        expected = target.index_copy(0, offsets, values)
        for at in (offsets, narrow_offsets(offsets, target.numel())):
            found = target.clone()
            put_elements(found, at, values)
            assert torch.equal(found, expected)


def test_offsets_are_narrowed_only_where_they_fit() -> None:
    offsets = torch.tensor([0, 5])
    assert narrow_offsets(offsets, 2**31 - 1).dtype == torch.int32
    assert narrow_offsets(offsets, 2**31).dtype == torch.int64


@pytest.mark.parametrize("threads", [1, 2])
def test_bytes_are_copied_to_views_and_from_them(threads: int) -> None:
    source = torch.randint(0, 255, (3_000_001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    target = torch.zeros(source.numel() + 2, dtype=torch.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        copy_bytes(target[1:-1], source)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(target[1:-1], source)
    assert target[0] == target[-1] == 0
