"""Cases of parametrised tests: few that cover everything for `make test`, all of them for `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest


def covering(*axes: Sequence[Any], keep: Collection[tuple[Any, ...]] = ()) -> list[Any]:
    """Every combination of the axes' values, of which only a few are not exhaustive.

    Those are the combinations in `keep`; without any, as many as the longest axis has values, among which is every value of
    every axis.
    """
    count = max(map(len, axes))
    first = {tuple(number % len(axis) for axis in axes) for number in range(count)}
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = tuple(axis[place] for axis, place in zip(axes, places, strict=True))
        always = values in keep if keep else places in first
        cases.append(pytest.param(*values, marks=() if always else pytest.mark.exhaustive))
    return cases
