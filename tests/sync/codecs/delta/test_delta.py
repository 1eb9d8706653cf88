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
from weightlane.sync.codecs.delta.format.wire_format import BLOCK, BLOCK_HEADER, HEADER

REGION = 1 << 16
"""Elements of one density."""


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
    patch.flip_(received)
    assert torch.equal(bits(received), bits(new))
    patch.flip_(received)
    assert torch.equal(bits(received), bits(old))
    positions, flips = patch.positions.long(), patch.flips
    assert (positions[1:] > positions[:-1]).all()
    assert torch.equal(bits(flips), (bits(old) ^ bits(new)).view(-1, new.itemsize)[positions].reshape(-1))
    assert torch.equal(differ, positions)
    return encoded, patch


@given(
    dtype=st.sampled_from(DTYPES),
    numel=st.one_of(st.integers(0, 300), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + REGION + 17])),
    densities=st.lists(
        st.sampled_from([0.0, 1e-4, 0.003, 0.01, 0.1, 0.24, 0.26, 0.5, 0.9, 0.97, 1.0]), min_size=4, max_size=4
    ),
    seed=st.integers(0, 2**16),
)
def test_a_delta_turns_the_base_into_the_new_version_whatever_the_dtype(
    dtype: torch.dtype, numel: int, densities: list[float], seed: int
) -> None:
    """Also where regions of other densities stand next to each other."""
    share = torch.tensor(densities).repeat_interleave(REGION).repeat(8)[:numel]
    old = random_bits((numel,), dtype, seed)
    where = torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < share
    encoded, _ = check_round_trip(old, flipped(old, where, seed))
    assert encoded.changed == int(where.sum())


@pytest.mark.parametrize(
    ("density", "steps", "most"),
    [
        (0.001, 1, 3.1),
        (0.01, 1, 2.1),
        (1.0, 1, 1.2),
        (0.01, 2**15 - 1, 3.2),
    ],
)
def test_a_changed_bf16_element_takes_about_two_bytes(density: float, steps: int, most: float) -> None:
    """Steps of the last digit, as a step of an optimiser takes them; by more steps, or random bits, at most a byte more."""
    numel, generator = 1 << 21, torch.Generator().manual_seed(0)
    old = torch.randn(numel, generator=generator).bfloat16()
    moved = torch.randint(1, steps + 1, (numel,), generator=generator) * (
        torch.rand(numel, generator=generator) < density
    )
    encoded, patch = check_round_trip(old, (old.view(torch.int16) + moved.short()).view(torch.bfloat16))
    assert encoded.changed == patch.carried == int((moved != 0).sum())
    assert encoded.nbytes <= most * encoded.changed


def test_a_delta_over_its_capacity_is_given_up_early() -> None:
    old = random_bits((3 * BLOCK,), torch.uint8)
    new = flipped(old, torch.ones(old.numel(), dtype=torch.bool))
    found = encode(old, new, capacity_bytes=BLOCK // 2)
    assert isinstance(found, TooDense)
    assert found.reached_bytes > found.capacity_bytes == BLOCK // 2
    assert found.compared == pytest.approx(1 / 3)
    assert "33%" in str(found)
    assert isinstance(encode(old, old, capacity_bytes=10), TooDense)
    exact = encode(old, old)
    assert isinstance(exact, Encoded)
    assert exact.nbytes == HEADER.size + 3 * BLOCK_HEADER.size, "blocks without changes take more than their headers"
    assert isinstance(encode(old, old, capacity_bytes=exact.nbytes), Encoded)


def test_a_patch_goes_only_where_it_belongs() -> None:
    old = torch.zeros(64, dtype=torch.bfloat16)
    encoded = encode(old, torch.ones_like(old))
    assert isinstance(encoded, Encoded)
    with pytest.raises(ConfigError, match="buffer"):
        encoded.write_into(torch.empty(encoded.nbytes - 1, dtype=torch.uint8))
    patch = decode(encoded.to_bytes(), elements=64, itemsize=2)
    for wrong in (torch.zeros(65, dtype=torch.bfloat16), torch.zeros(64)):
        with pytest.raises(ConfigError, match="64 elements of 2 bytes"):
            patch.flip_(wrong)
    with pytest.raises(ConfigError, match="not contiguous"):
        patch.flip_(torch.zeros(64, 2, dtype=torch.bfloat16)[:, 0])
    received = torch.zeros(8, 8, dtype=torch.bfloat16)
    patch.to("cpu").flip_(received)
    assert received.eq(1).all()


ELEMENTS = 2 * BLOCK + 70_000


def delta(seed: int = 0) -> torch.Tensor:
    """A valid delta with a block of gaps and flips of one byte, a short bitmap with whole flips, and a block without changes."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.tensor([0.01, 0.0, 0.4]).repeat_interleave(BLOCK)[:ELEMENTS]
    large = torch.tensor([1, 0, 1 << 12]).repeat_interleave(BLOCK)[:ELEMENTS].short()
    old = torch.randint(0, 2**15, (ELEMENTS,), dtype=torch.int16, generator=generator)
    encoded = encode(old, old ^ large * (torch.rand(ELEMENTS, generator=generator) < share).short())
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


_PLACES = HEADER.size + BLOCK_HEADER.size
BROKEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "nothing": (lambda wire: wire[:0], "not even a header"),
    "a format of the future": (poke(4, 9), "format 9"),
    "elements of three bytes": (poke(5, 3), "elements of 3 bytes"),
    "too long": (lambda wire: torch.cat((wire, wire[:8])), "says to have"),
    "more changes than carried": (poke(16, 0), "its header says"),
    "more changes than elements": (poke(HEADER.size + 3, 1), "changed ones"),
    "places longer than all": (poke(HEADER.size + 7, 255), "were to follow"),
    "gaps of three bytes": (poke(HEADER.size + 12, 3), "gaps of 3 bytes"),
    "a bitmap of gaps": (poke(HEADER.size + 12, 0), "gaps of 0 bytes"),
    "flips of three bytes": (poke(HEADER.size + 13, 3), "flips of 3 bytes"),
    "a flip that lacks its bytes": (lambda wire: poke(_flips(wire), 0)(wire), "flips of 1 bytes"),
    "a gap too many": (poke(_PLACES, 255), "places instead of"),
    "a last gap without an end": (lambda wire: _last_gap(wire, 255), "does not end"),
    "a change behind the last element": (lambda wire: _last_gap(wire, 254), "place 1048[0-9]+ of 1048576"),
}


def _flips(wire: torch.Tensor) -> int:
    """The first byte of the first block's flips."""
    return _PLACES + -(-int(wire[HEADER.size + 4 : HEADER.size + 8].view(torch.int32)) // 8) * 8


def _last_gap(wire: torch.Tensor, code: int) -> torch.Tensor:
    wire[_PLACES + int(wire[HEADER.size + 4 : HEADER.size + 8].view(torch.int32)) - 1] = code
    return wire


@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_delta_is_refused_in_words(kind: str) -> None:
    change, says = BROKEN[kind]
    with pytest.raises(ProtocolError, match=says) as caught:
        read(change(delta()))
    assert caught.value.hint


def test_no_damage_is_ever_taken_for_anything_but_a_delta_of_the_segment() -> None:
    """Random damage is refused, or what is left is a valid delta, whose flips alone may be wrong."""
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
        positions = patch.positions.long()
        assert (positions[1:] > positions[:-1]).all()
        assert positions[0] >= 0
        assert positions[-1] < ELEMENTS
        patch.flip_(torch.zeros(ELEMENTS, dtype=torch.int16))
    assert refused > 30
