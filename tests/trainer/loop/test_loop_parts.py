"""The staleness budget admits no group that would be trained too late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightlane.trainer.loop.staleness_budget import StalenessBudget


@given(
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 5),
    first_version=st.integers(0, 3),
    syncs=st.lists(st.booleans(), min_size=1, max_size=40),
)
def test_no_group_the_budget_admits_is_too_stale_and_the_trainer_never_starves(
    max_staleness: int, groups_per_step: int, first_version: int, syncs: list[bool]
) -> None:
    """Groups are trained in the order in which they were admitted, and a sync may or may not end before the next step."""
    budget = StalenessBudget(max_staleness, groups_per_step, first_version)
    waiting: list[int] = []
    step = first_version
    for synced in syncs:
        while budget.room > 0:
            budget.admit()
            waiting.append(budget.committed)
        if len(waiting) >= groups_per_step:
            batch, waiting = waiting[:groups_per_step], waiting[groups_per_step:]
            assert not any(budget.is_too_stale(step, version) for version in batch)
            step += 1
        else:
            assert budget.committed < step, "only a sync that is behind may keep the trainer waiting"
        assert step - budget.committed <= max_staleness + 1
        if synced:
            budget.committed = step
