"""The delta codec: what comes out is the new version, bit for bit, and nothing but a delta is taken for one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from bits import DTYPES, bits, random_bits
from hypothesis import given
from hypothesis import strategies as st

from weightlane.ckpt_engines import ConfigError, ProtocolError
from weightlane.sync.codecs.delta.format import decode, encode
from weightlane.sync.codecs.delta.format.encoder import Encoded, TooDense
from weightlane.sync.codecs.delta.format.patch import Patch
from weightlane.sync.codecs.delta.format.wire_format import BLOCK, FRAME, FRAME_HEADER, HEADER, SECTION_HEADER


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


ELEMENTS = 5 * BLOCK + 1000


def delta(seed: int = 0) -> torch.Tensor:
    """A valid delta with unchanged, sparse and bitmap blocks and a short last one."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.tensor([0.001, 0.0, 0.4, 1.0, 0.01, 0.02]).repeat_interleave(BLOCK)[:ELEMENTS]
    old = torch.randint(0, 2**15, (ELEMENTS,), dtype=torch.int16, generator=generator)
    encoded = encode(old, old ^ (torch.rand(ELEMENTS, generator=generator) < share).short())
    assert isinstance(encoded, Encoded)
    return encoded.to_bytes()


def read(wire: torch.Tensor | bytes) -> None:
    decode(wire, elements=ELEMENTS, itemsize=2)


def test_another_segments_delta_is_refused() -> None:
    wire = delta()
    with pytest.raises(ProtocolError, match=f"for {ELEMENTS} elements of 2 bytes, the segment has {ELEMENTS - 1}"):
        decode(wire, elements=ELEMENTS - 1, itemsize=2)
    with pytest.raises(ProtocolError, match="of 4"):
        decode(wire, elements=ELEMENTS, itemsize=4)


def poke(offset: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(wire: torch.Tensor) -> torch.Tensor:
        wire[offset] = value
        return wire

    return change


_METHODS = HEADER.size + FRAME_HEADER.size
_FIRST_SECTION = _METHODS + 8
BROKEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "nothing": (lambda wire: wire[:0], "not even a header"),
    "a format of the future": (poke(4, 9), "format 9"),
    "elements of three bytes": (poke(5, 3), "elements of 3 bytes"),
    "too long": (lambda wire: torch.cat((wire, wire[:8])), "says to have"),
    "more values than carried": (poke(16, 0), "its header says"),
    "a frame longer than all": (poke(HEADER.size + 3, 255), "were to follow"),
    "an unknown method": (poke(_METHODS, 77), "method 77"),
    "a section of 2**56 values": (poke(_FIRST_SECTION + 7, 1), "values for"),
    "a bitmap of more bits than values": (
        lambda wire: poke(_FIRST_SECTION, 1)(_zero(wire, _FIRST_SECTION, 8)),
        "bits set for 1 values",
    ),
}


def _zero(wire: torch.Tensor, start: int, count: int) -> torch.Tensor:
    wire[start : start + count] = 0
    return wire


@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_delta_is_refused_in_words(kind: str) -> None:
    change, says = BROKEN[kind]
    with pytest.raises(ProtocolError, match=says) as caught:
        read(change(delta()))
    assert caught.value.hint


def test_positions_that_do_not_ascend_are_refused() -> None:
    old = torch.zeros(ELEMENTS, dtype=torch.int16)
    new = old.clone()
    new[50::200] = 1
    new[51::200] = 1  # the same high bits
    encoded = encode(old, new)
    assert isinstance(encoded, Encoded)
    wire, places = encoded.to_bytes(), _FIRST_SECTION + SECTION_HEADER.size
    assert wire[_METHODS] == 2 + 2, "six low bits: a plane of 4, a plane of 2"
    count = len(range(50, ELEMENTS, 200)) + len(range(51, ELEMENTS, 200))
    low_bytes = -(-count // 2) + -(-count // 4)
    with pytest.raises(ProtocolError, match="do not ascend"):
        read(_zero(wire.clone(), places, low_bytes))
    with pytest.raises(ProtocolError, match="positions instead of"):
        read(_zero(wire, places + low_bytes, 1))


def test_no_damage_is_ever_taken_for_anything_but_a_delta_of_the_segment() -> None:
    """Random damage is refused, or what is left is a valid delta, whose values alone may be wrong."""
    dice = random.Random(7)
    refused = 0
    start = delta(3)
    for _ in range(100):
        wire = start.clone()
        for _ in range(dice.choice([1, 1, 1, 2, 8])):
            at = dice.choice([dice.randrange(200), dice.randrange(wire.numel())])
            wire[at] = dice.choice([0, 255, int(wire[at]) ^ 1 << dice.randrange(8)])
        if dice.random() < 0.2:
            wire = wire[: dice.randrange(wire.numel())]
        try:
            patch = decode(wire, elements=ELEMENTS, itemsize=2)
        except ProtocolError:
            refused += 1
            continue
        positions, _ = patch.positions_and_values()
        assert (positions[1:] > positions[:-1]).all()
        assert positions[0] >= 0
        assert positions[-1] < ELEMENTS
        patch.swap_(torch.zeros(ELEMENTS, dtype=torch.int16))
    assert refused > 30
