"""The loop with parts that live in this process: which tasks it uses, what it saves and reports, what ends it."""

from __future__ import annotations

from collections import Counter

import pytest
from loop_world import BLOCKED_S, PUBLISH_S, TASKS, World, first_is_better, run
from waiting import NEVER_S

from weightlane.ckpt_engines import PeerLostError, WeightlaneError, WorkerDiedError
from weightlane.trainer.loop.state import LoopState


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_that_is_resumed_uses_every_task_that_was_not_trained_on_and_none_twice(max_staleness: int) -> None:
    world = World()
    summary = run(world, first_is_better, max_staleness=max_staleness, save_every=2)
    every_task = Counter(task.prompt for task in TASKS)
    assert Counter(world.trained) == every_task, "six steps of two are one epoch"
    assert max(world.staleness) <= max_staleness
    assert world.version == 6, "the last version serves"
    assert summary.accuracy_before == summary.accuracy_after == 1.0
    assert world.events == ["well"]
    for state in world.saved[:-1]:
        again = World(step=state.step)
        resumed = LoopState.from_plain(state.to_plain())
        run(again, first_is_better, max_staleness=max_staleness, resume=resumed)
        assert Counter(world.trained[: 2 * state.step] + again.trained) == every_task
        assert again.version == 6


@pytest.mark.parametrize(
    ("died", "notice_s", "error", "said"),
    [(True, NEVER_S, WorkerDiedError, "trainer rank 1"), (False, 0.02, PeerLostError, "the connection was reset")],
)
def test_a_process_that_died_is_named_rather_than_what_its_death_made_fail(
    monkeypatch: pytest.MonkeyPatch, died: bool, notice_s: float, error: type[WeightlaneError], said: str
) -> None:
    monkeypatch.setattr("weightlane.trainer.loop.loop._DEATH_NOTICE_S", notice_s)
    world = World(fails_at_step=2, failure_is_a_death=died)
    with pytest.raises(error, match=said):
        run(world, first_is_better)
    assert world.step == 2


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_state_and_a_model_are_written_when_their_version_is_on_its_way(max_staleness: int) -> None:
    world = World()
    run(world, first_is_better, max_staleness=max_staleness, save_every=2, export_every=2)
    assert [state.step for state in world.saved] == [2, 4, 6]
    for step in (2, 4, 6):
        published = world.log.index(f"published {step}")
        assert published < world.log.index(f"saved {step}")
        assert published < world.log.index(f"exported {step}")


def test_what_the_model_can_do_is_measured_beside_the_training_and_some_of_what_it_wrote_is_told() -> None:
    world = World()
    run(world, first_is_better, max_staleness=2, evaluate_every=2, samples_per_step=3, steps=9)
    steps = [step for step, _ in world.evaluations]
    assert (steps[0], steps[-1]) == (0, 9)
    assert set(steps[1:-1]) <= {2, 4, 6, 8}
    assert steps == sorted(set(steps))
    assert len(steps) > 2, "there is one beside the training"
    assert all(facts["version_min"] <= facts["version_max"] <= step for step, facts in world.evaluations)
    assert [step for step, _ in world.samples] == list(range(1, 10))
    assert all(len(some) == 3 and len({sample["prompt"] for sample in some}) == 2 for _, some in world.samples)
    sample = world.samples[0][1][0]
    assert sample["prompt"].startswith("task-")
    assert (sample["completion"], sample["reward"], sample["versions"]) == ("AAAA", 1.0, [0])


def test_versions_that_the_trainer_waits_for_are_timed_and_aborted_ones_are_sent_again() -> None:
    world = World(aborts=[3, 6])  # one that the trainer waits for, and the last one
    summary = run(world, first_is_better, blocking_syncs=3, max_staleness=2)
    assert summary.blocking_way_s > 0
    assert summary.versions_aborted == 2
    assert (world.step, world.version) == (6, 6)
    assert run(World(), first_is_better).blocking_way_s == 0, "nobody asked for it"


def test_what_either_side_loses_to_syncs_is_told_for_every_step_and_per_step_at_the_end() -> None:
    world = World()
    summary = run(world, first_is_better, blocking_syncs=2, max_staleness=2)
    published = [int(line.split()[1]) for line in world.log if line.startswith("published")]
    beside = [version for version in published if version not in (0, 2, 4)]  # the trainer waits for 2 and 4
    assert {2, 4} < set(published)
    assert 1 in beside
    assert summary.trainer_lost_per_step_s == pytest.approx(PUBLISH_S * len(beside) / 4)
    assert summary.rollout_lost_per_step_s == pytest.approx(BLOCKED_S * len(beside) / 4)
    told = [facts["rollout_blocked_s"] / BLOCKED_S for facts in world.steps]
    before_the_last_step = [version for version in beside if version < world.step - 1]
    assert len(before_the_last_step) <= sum(told) <= len(beside)
    assert ["blocking_way_s" in facts for facts in world.steps] == [False, False, True, True, True, True]
    assert world.steps[-1]["blocking_way_s"] > 0.0
