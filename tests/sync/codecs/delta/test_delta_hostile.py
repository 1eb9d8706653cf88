"""The decoder refuses malformed deltas from a peer with a clear error, and never writes them anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from weightlane.ckpt_engines import ProtocolError
from weightlane.sync.codecs.delta.format import decode, encode
from weightlane.sync.codecs.delta.format.encoder import Encoded
from weightlane.sync.codecs.delta.format.wire_format import BLOCK, FRAME_HEADER, HEADER, SECTION_HEADER

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
