"""The examples in docstrings run."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from weightlane.sync import plan
from weightlane.sync.codecs import quantised
from weightlane.sync.codecs.delta import format as delta
from weightlane.sync.plan import send_assignment, transfer_plan
from weightlane.sync.version import box


@pytest.mark.parametrize(
    "module", [box, delta, plan, quantised, send_assignment, transfer_plan], ids=lambda module: module.__name__
)
def test_the_example_runs(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 1
    assert not found.failed
