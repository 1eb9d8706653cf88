"""The delta codec: what comes out is the new version, bit for bit, and nothing but a delta is taken for one."""

from __future__ import annotations

import pytest
import torch
from bits import DTYPES, bits, random_bits
from hypothesis import given
from hypothesis import strategies as st

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.codecs.delta.format import decode, encode
from weightlane.sync.codecs.delta.format.encoder import Encoded, TooDense
from weightlane.sync.codecs.delta.format.patch import Patch
from weightlane.sync.codecs.delta.format.wire_format import BLOCK, FRAME


def flipped(old: torch.Tensor, where: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """`old` with one bit of every element in the mask `where` flipped; of a bool the value."""
    new = old.clone()
    items = new.view(torch.uint8).view(-1, old.itemsize)
    byte = seed % old.itemsize
    items[where, byte] ^= 1 if old.dtype is torch.bool else 1 << seed % 8
    return new


def check_round_trip(old: torch.Tensor, new: torch.Tensor) -> tuple[Encoded, Patch]:
    """Encode, write, decode and swap; every result is what it should be to the bit."""
    encoded = encode(old, new)
    assert isinstance(encoded, Encoded)
    items = bits(old).view(-1, old.itemsize) != bits(new).view(-1, old.itemsize)
    differ = items.any(1).nonzero().squeeze(1)
    assert encoded.changed == differ.numel()
    wire = encoded.to_bytes()
    assert wire.numel() == encoded.nbytes
    assert encoded.nbytes <= new.nbytes * 1.0001 + new.numel() / 8 + 200
    patch = decode(wire, elements=new.numel(), itemsize=new.itemsize)
    bits(wire).fill_(255)  # the patch owns its memory
    received = old.clone()
    patch.swap_(received)
    assert torch.equal(bits(received), bits(new))
    patch.swap_(received)
    assert torch.equal(bits(received), bits(old))
    positions, values = patch.positions_and_values()
    assert (positions[1:] > positions[:-1]).all()
    assert torch.equal(bits(values), bits(new).view(-1, new.itemsize)[positions].reshape(-1))
    assert torch.isin(differ, positions).all()
    return encoded, patch


@given(
    dtype=st.sampled_from(DTYPES),
    numel=st.one_of(st.integers(0, 300), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])),
    densities=st.lists(
        st.sampled_from([0.0, 1e-4, 0.003, 0.01, 0.1, 0.24, 0.26, 0.5, 0.9, 0.97, 1.0]), min_size=4, max_size=4
    ),
    seed=st.integers(0, 2**16),
)
def test_a_delta_turns_the_base_into_the_new_version_whatever_the_dtype(
    dtype: torch.dtype, numel: int, densities: list[float], seed: int
) -> None:
    """Also where blocks of other densities stand beside each other."""
    share = torch.tensor(densities).repeat_interleave(BLOCK)[:numel]
    old = random_bits((numel,), dtype, seed)
    where = torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < share
    encoded, _ = check_round_trip(old, flipped(old, where, seed))
    assert encoded.changed == int(where.sum())


@pytest.mark.parametrize(
    ("density", "most"), [(0.0, 0.0001), (0.001, 0.0019), (0.01, 0.0157), (0.2, 0.255), (0.5, 0.565), (1.0, 1.0626)]
)
def test_a_delta_is_about_as_small_as_it_can_be(density: float, most: float) -> None:
    """For up to 20 % random bf16 changes, positions cost within 0.65 bits per change of their entropy (8.08 bits at 1 %)."""
    numel = 1 << 19
    old = random_bits((numel,), torch.bfloat16)
    encoded = encode(old, flipped(old, torch.rand(numel, generator=torch.Generator().manual_seed(0)) < density))
    assert isinstance(encoded, Encoded)
    assert encoded.nbytes / old.nbytes < most
    patch = decode(encoded.to_bytes(), elements=numel, itemsize=2)
    assert patch.carried >= encoded.changed
    assert density == 1.0 or patch.nbytes <= 3 * patch.carried * old.itemsize


def test_a_delta_over_its_capacity_is_given_up_early() -> None:
    old = random_bits((3 * FRAME,), torch.uint8)
    new = flipped(old, torch.ones(old.numel(), dtype=torch.bool))
    found = encode(old, new, capacity_bytes=FRAME // 2)
    assert isinstance(found, TooDense)
    assert found.reached_bytes > found.capacity_bytes == FRAME // 2
    assert found.compared == pytest.approx(1 / 3)
    assert "33%" in str(found)
    assert isinstance(encode(old, old, capacity_bytes=10), TooDense)
    exact = encode(old, old)
    assert isinstance(exact, Encoded)
    assert isinstance(encode(old, old, capacity_bytes=exact.nbytes), Encoded)
    assert isinstance(encode(old[:0], old[:0], capacity_bytes=0), TooDense)


def test_a_patch_goes_only_where_it_belongs() -> None:
    old = torch.zeros(64, dtype=torch.bfloat16)
    encoded = encode(old, torch.ones_like(old))
    assert isinstance(encoded, Encoded)
    with pytest.raises(ConfigError, match="buffer"):
        encoded.write_into(torch.empty(encoded.nbytes - 1, dtype=torch.uint8))
    patch = decode(encoded.to_bytes(), elements=64, itemsize=2)
    for wrong in (torch.zeros(65, dtype=torch.bfloat16), torch.zeros(64)):
        with pytest.raises(ConfigError, match="64 elements of 2 bytes"):
            patch.swap_(wrong)
    with pytest.raises(ConfigError, match="not contiguous"):
        patch.swap_(torch.zeros(64, 2, dtype=torch.bfloat16)[:, 0])
    received = torch.zeros(8, 8, dtype=torch.bfloat16)
    patch.to("cpu").swap_(received)
    assert received.eq(1).all()
