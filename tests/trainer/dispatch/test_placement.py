"""Trainer ranks that exchange activations in every layer are on one node, and neighbours on as few as possible."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.exhaustive]


def test_neighbours_are_placed_together_and_what_cannot_be_reserved_is_said(children) -> None:
    code, printed, errors = children.run([str(Path(__file__).with_name("placed_ranks.py"))])
    assert code == 0, errors
    found = json.loads(printed.splitlines()[-1])
    first, second = found["pairs"][0], found["pairs"][3]
    assert found["pairs"] == [first] * 3 + [second] * 3
    assert first != second
    for name in ("wider than a node", "single"):
        assert len(list(groupby(found[name]))) == 2, "each node has one range of ranks"
    assert "the reservation of resources was not answered within 3 s" in found["too many"]
    assert "`ray status`" in found["too many"]
