"""Selects the checks of the templates' suites that `make test` runs: the templates have no marks of this repository."""

from __future__ import annotations

import pytest

PROMISED = {
    "weightlane-training-engine-template/": "test_a_saved_run_continues_bit_for_bit[two ranks]",
    "weightlane-rollout-engine-template/": "test_requests_in_flight_switch_models_where_their_stamps_switch",
}
"""Enough to see that a template works: `test_broken_training_engines` runs every check on engines derived from the first one, and
`test_rollout_conformance` on an engine with the parts of the second one."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the other checks of these templates as exhaustive."""
    for item in items:
        if any(folder in item.nodeid and not item.name.endswith(check) for folder, check in PROMISED.items()):
            item.add_marker("exhaustive")
