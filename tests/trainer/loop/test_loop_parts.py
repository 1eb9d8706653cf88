"""Rules of the loop, each on its own: staleness, overlap, quantiles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import MovableClock

from weightlane.trainer.loop.overlap import OverlapClock
from weightlane.trainer.loop.staleness_budget import StalenessBudget
from weightlane.trainer.loop.summary import Quantiles


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


def test_at_zero_staleness_a_step_of_groups_waits_for_the_step_before_or_takes_the_place_of_one_given_back() -> None:
    budget = StalenessBudget(0, 2)
    assert budget.room == 2
    budget.admit()
    budget.admit()
    assert budget.room == 0
    budget.give_back()
    assert budget.room == 1
    budget.admit()
    budget.committed = 1
    assert budget.room == 2
    assert budget.is_too_stale(2, 1)
    assert not budget.is_too_stale(1, 1)


# -- overlap ------------------------------------------------------------------------------------------------------------


def test_only_time_in_which_two_activities_are_busy_counts_as_overlap() -> None:
    now = MovableClock()
    clock = OverlapClock(now)
    now.advance(1.0)  # nothing: 1 s
    with pytest.raises(RuntimeError), clock.busy("training"):
        raise RuntimeError  # it is not busy any more
    with clock.busy("generation"):
        now.advance(2.0)  # generation alone: 2 s
        with clock.busy("generation"), clock.busy("training"):
            now.advance(4.0)  # both: 4 s
        now.advance(1.0)  # generation alone again
    assert clock.wall_s() == 8.0
    assert clock.share_together() == 4.0 / 8.0
    assert (clock.seconds("generation"), clock.seconds("training")) == (7.0, 4.0)


def test_a_restarted_clock_forgets_the_past_but_not_who_is_busy() -> None:
    now = MovableClock()
    clock = OverlapClock(now)
    assert clock.share_together() == 0.0
    with clock.busy("generation"):
        now.advance(5.0)
        clock.restart()
        with clock.busy("training"):
            now.advance(3.0)
    assert clock.share_together() == 1.0
    assert clock.seconds("generation") == 3.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_quantiles_are_values_of_the_series_in_order(values: list[float]) -> None:
    quantiles = Quantiles.of(values)
    assert {quantiles.p50, quantiles.p95, quantiles.max} <= set(values)
    assert min(values) <= quantiles.p50 <= quantiles.p95 <= quantiles.max == max(values)
