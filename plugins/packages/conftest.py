"""Selects the checks of the templates' suites that `make test` runs: the templates have no marks of this repository."""

from __future__ import annotations

import pytest

TRAINING_TEMPLATE = "weightlane-training-engine-template/"
PROMISED = "test_a_saved_run_continues_bit_for_bit[two ranks]"
"""Enough to see that the template works: `test_broken_training_engines` runs every check on engines derived from it."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the other checks of the training engine's template as exhaustive."""
    for item in items:
        if TRAINING_TEMPLATE in item.nodeid and not item.name.endswith(PROMISED):
            item.add_marker("exhaustive")
