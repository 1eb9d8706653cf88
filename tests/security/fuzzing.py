"""Values and bytes that nobody expects, and the ways in which a parser must survive them."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

from weightlane.ckpt_engines import CheckpointEngineRegistry, WeightlaneError

MEMORY_LIMIT_BYTES = 64 << 20
REGISTRY = CheckpointEngineRegistry()


_NUMBERS = [2**31, 2**63, 2**64, -1, -(2**63), 10**4000, 1e308, float("inf"), float("nan"), True]
_TEXTS = ["", "\0", "\ud800", "../x", "/", "0", "x" * 10_000]
NASTY = st.sampled_from([*_NUMBERS, *_TEXTS, None])
TEXT = st.text(st.characters(), max_size=8)
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | NASTY
JSON = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)


@st.composite
def mutated(draw: st.DrawFn, valid: Any) -> Any:
    """`valid` plain data, of which one to three places were replaced, removed, renamed or doubled; or something else."""
    if draw(st.integers(0, 9)) == 0:
        return draw(JSON)
    plain = {"": copy.deepcopy(valid)}
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(plain))
        container, key = places[draw(st.integers(0, len(places) - 1))]
        change = draw(st.sampled_from(["replace", "replace", "remove", "double"]))
        if change == "replace" or key == "":
            container[key] = draw(JSON)
        elif change == "remove":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        else:
            container[draw(TEXT)] = copy.deepcopy(container[key])
    return plain.get("")


def _places(container: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(container) if isinstance(container, dict) else range(len(container))
    for key in keys:
        yield container, key
        if isinstance(container[key], dict | list):
            yield from _places(container[key])


@st.composite
def mutated_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """`valid` bytes with some changed, cut, or added; or any others."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        change = draw(st.sampled_from(["set", "cut", "insert"]))
        if change == "set" and place < len(data):
            data[place] = draw(st.integers(0, 255))
        elif change == "cut":
            del data[place:]
        else:
            data[place:place] = draw(st.binary(max_size=9))
    return bytes(data)


def survives(call: Callable[[], Any]) -> None:
    """`call` returns or raises one of our errors, whose text can be told and sent on; nothing else."""
    try:
        call()
    except WeightlaneError as error:
        str(error)
        json.dumps(error.to_wire())


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that Python's objects took at once while `call` ran, beyond those from before."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
