"""The examples in the facades' docstrings run."""

from __future__ import annotations

import doctest

import pytest

from weightlane.sync.codecs import quantised
from weightlane.sync.codecs.delta import format as delta


@pytest.mark.parametrize("module", [delta, quantised], ids=["delta", "quantised"])
def test_the_example_runs(module: object) -> None:
    found = doctest.testmod(module)  # type: ignore[arg-type]
    assert found.attempted > 3
    assert not found.failed
