"""Trainers and replicas that share devices take turns: never together, never in a wait, and with the samples of any other run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from loop_world import ALGORITHM, TASKS, LiveRollout, World, first_is_better, run
from waiting import NEVER_S

from weightlane.ckpt_engines import WorkerDiedError
from weightlane.trainer.loop.protocols import LoopState

SETTINGS: dict[str, Any] = {"max_staleness": 0, "save_every": 2, "export_every": 3}


def check_turns(world: World) -> None:
    """Gradients and optimizer state meet neither weights nor caches of replicas, and parameters meet no caches."""
    for here in world.together:
        assert not ("optimizer" in here and here & {"weights", "caches"}), here
        assert not here >= {"parameters", "caches"}, here
    assert {"parameters", "weights"} in world.together, "for the sync"
    assert {"weights", "caches"} in world.together


@pytest.mark.parametrize(
    ("made", "more"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param({"skips": {1}}, {}, id="a step that changes nothing"),
        pytest.param({"aborts": [2, 3]}, {}, id="aborted versions"),
        pytest.param({}, {"evaluate_every": 1, "blocking_syncs": 2}, id="evaluations in between"),
        pytest.param({}, {"blocking_syncs": 6}, id="every version waited for"),
    ],
)
def test_a_run_in_turns_uses_the_tasks_of_one_that_overlaps_nothing_and_states_are_never_together(
    made: dict[str, Any], more: dict[str, Any]
) -> None:
    worlds = []
    for colocate in (False, True):
        world = World(**{name: type(value)(value) for name, value in made.items()})
        world.add(LiveRollout(world, "rollout-1"))
        summary = run(world, first_is_better, colocate=colocate, **SETTINGS | more)
        assert summary.accuracy_after == 1.0
        worlds.append(world)
    apart, turns = worlds
    assert turns.trained == apart.trained
    assert turns.staleness == apart.staleness == [0] * 6
    assert turns.failures == apart.failures
    assert [state.step for state in turns.saved] == [state.step for state in apart.saved] == [2, 4, 6]
    assert turns.version == apart.version == 6
    check_turns(turns)
    assert turns.turns.count("generation") == turns.turns.count("training") == 6 + len(made.get("skips", ()))
    assert turns.turns.count("sync") == 7 + len(made.get("skips", ()))
    for state in turns.saved:
        assert not state.outstanding, "nothing is generated while a state is written"
        again = World(step=state.step)
        run(again, first_is_better, colocate=True, resume=LoopState.from_plain(state.to_plain()), **SETTINGS)
        assert Counter(turns.trained[: 2 * state.step] + again.trained) == Counter(turns.trained)
        check_turns(again)


@pytest.mark.parametrize("notice_s", [NEVER_S, 0.02], ids=["watched", "by a call"])
def test_a_replica_that_dies_asleep_ends_the_run_and_is_named(monkeypatch: pytest.MonkeyPatch, notice_s: float) -> None:
    monkeypatch.setattr("weightlane.trainer.loop.loop._DEATH_NOTICE_S", notice_s)
    world = World()
    world.at_step[3] = world.replicas["rollout-0"].gone.set
    with pytest.raises(WorkerDiedError, match="rollout-0"):
        run(world, first_is_better, colocate=True, quorum=1.0, **SETTINGS)
    assert world.step == 3
    assert len(world.trained) == 3 * ALGORITHM.prompts_per_step < len(TASKS)
