"""The loop with parts that live in this process: which tasks it uses, what it saves and reports, what ends it.

Replicas that die are replaced, within limits, and no task is lost or used twice.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
from loop_world import BLOCKED_S, PUBLISH_S, TASKS, LiveRollout, World, first_is_better, run
from simulated_time import SimulatedTimeLoop
from waiting import NEVER_S

from weightlane.ckpt_engines import ConfigError, PeerLostError, SyncAbortedError, WeightlaneError, WorkerDiedError
from weightlane.sync import Outcome, ReplicaReport, ReplicaState, SyncReport
from weightlane.trainer.data.tasks import Task
from weightlane.trainer.loop.protocols import LoopState, Rollout, StartReplica


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
    for state in world.saved:
        again = World(step=state.step)
        resumed = LoopState.from_plain(state.to_plain())
        run(again, first_is_better, max_staleness=max_staleness, resume=resumed)
        assert Counter(world.trained[: 2 * state.step] + again.trained) == every_task
        assert again.version == 6
        assert len(again.saved) == (state.step < 6), "a state is not replaced by the same one"
        assert again.log[-1] == "exported 6"


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

    def judge(completion: str, task: Mapping[str, Any]) -> float:
        """Good enough are two, one or none of the completions A, B, C and D of a held-out task."""
        good = {"two": "AB", "one": "B", "none": ""}.get(task["prompt"], "A")
        return 0.75 if completion[0] in good else 0.5 if completion[0] == "C" else 0.0

    sets = {"maths": [Task("two", ""), Task("one", "")], "code-2": [Task("none", "")], "empty": []}
    more = {"evaluate_samples": 4, "pass_reward": 0.75}
    summary = run(world, judge, heldout=sets, max_staleness=2, evaluate_every=2, samples_per_step=3, steps=9, **more)
    for measured in (summary.measured_before, summary.measured_after, *(facts for _, facts in world.evaluations)):
        assert measured is not None
        assert (measured["tasks"], measured["failed"]) == (3, 0)
        assert (measured["accuracy_maths"], measured["accuracy_code-2"]) == (0.75 / 2, 0.0)
        assert measured["accuracy"] == 0.75 / 4, "the sets count alike"
        for k in (1, 2, 4):
            draws = list(itertools.combinations("ABCD", k))
            passed = [sum(bool(set(draw) & set(good)) for draw in draws) / len(draws) for good in ("AB", "B")]
            assert measured[f"pass_at_{k}_maths"] == pytest.approx(sum(passed) / 2, abs=1e-15)
            assert measured[f"pass_at_{k}"] == pytest.approx(sum(passed) / 4, abs=1e-15)
        assert "pass_at_3" not in measured
    steps = [step for step, _ in world.evaluations]
    assert (steps[0], steps[-1]) == (0, 9)
    assert set(steps[1:-1]) <= {2, 4, 6, 8}
    assert steps == sorted(set(steps))
    assert len(steps) > 2, "there is one beside the training"
    assert all(facts["version_min"] <= facts["version_max"] <= 9 for _, facts in world.evaluations)
    assert [step for step, _ in world.samples] == list(range(1, 10))
    assert all(len(some) == 3 and len({sample["prompt"] for sample in some}) == 2 for _, some in world.samples)
    sample = world.samples[0][1][0]
    assert sample["prompt"].startswith("task-")
    assert (sample["completion"], sample["reward"], sample["versions"]) == ("AAAA", 0.75, [[0, 4]])


def test_versions_finished_during_a_sync_are_skipped_for_the_newest_and_none_is_published_during_a_step() -> None:
    world = World(step_s=1.0, sync_s=2.5)
    run(world, first_is_better, max_staleness=6, steps=12, event_loop=SimulatedTimeLoop)
    assert world.published_versions == [0, 1, 4, 7, 10, 12], "a sync that ends during a step waits for the end of that"
    assert world.version == 12


def test_aborted_versions_are_followed_by_others_until_too_many_in_a_row_end_the_run() -> None:
    world = World(step_s=1.0, aborts=[1, 2, 4, 5])
    settings = {"max_staleness": 6, "max_failed_syncs": 2, "event_loop": SimulatedTimeLoop}
    summary = run(world, first_is_better, **settings)
    assert (world.version, summary.versions_aborted) == (6, 4), "a commit clears the count"
    world = World(step_s=1.0, aborts=[2, 3, 4, 5])
    with pytest.raises(SyncAbortedError, match="the connection was reset"):
        run(world, first_is_better, **settings)
    assert (world.version, world.aborts) == (1, [5])


def test_versions_that_the_trainer_waits_for_are_timed_and_aborted_ones_are_sent_again() -> None:
    world = World(aborts=[3, 6])  # one that the trainer waits for, and the last one
    summary = run(world, first_is_better, blocking_syncs=3, max_staleness=2)
    assert summary.synchronous_update_s > 0
    assert summary.versions_aborted == 2
    assert (world.step, world.version) == (6, 6)
    assert run(World(), first_is_better).synchronous_update_s == 0, "nobody asked for it"


def test_what_either_side_loses_to_syncs_is_told_for_every_step_and_per_step_at_the_end() -> None:
    world = World()
    summary = run(world, first_is_better, blocking_syncs=2, max_staleness=2)
    published = world.published_versions
    beside = [version for version in published if version not in (0, 2, 4)]  # the trainer waits for 2 and 4
    assert {2, 4} < set(published)
    assert 1 in beside
    assert summary.trainer_lost_per_step_s == pytest.approx(PUBLISH_S * len(beside) / 4)
    assert summary.rollout_lost_per_step_s == pytest.approx(BLOCKED_S * len(beside) / 4)
    told = [facts["rollout_blocked_s"] / BLOCKED_S for facts in world.steps]
    before_the_last_step = [version for version in beside if version < world.step - 1]
    assert len(before_the_last_step) <= sum(told) <= len(beside)
    assert ["synchronous_update_s" in facts for facts in world.steps] == [False, False, True, True, True, True]
    assert world.steps[-1]["synchronous_update_s"] > 0.0


# -- replicas that die --------------------------------------------------------------------------------------------------------


def successors(world: World, *, failing: str = "") -> StartReplica:
    async def start_replica(name: str) -> Rollout:
        await asyncio.sleep(0.01)
        if name == failing:
            raise ConfigError("no room.", part=name)
        return cast("Rollout", LiveRollout(world, name))

    return start_replica


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_replica_that_dies_is_replaced_and_no_task_is_lost_or_used_twice(max_staleness: int) -> None:
    world = World()
    first, second = world.replicas["rollout-0"], LiveRollout(world, "rollout-1")
    world.add(second)
    world.at_step[2] = first.gone.set
    settings = {"start_replica": successors(world), "max_staleness": max_staleness, "event_loop": SimulatedTimeLoop}
    summary = run(world, first_is_better, steps=36, **settings)
    assert Counter(world.trained) == Counter({task.prompt: 6 for task in TASKS})
    assert max(world.staleness) <= max_staleness
    assert (summary.replicas_lost, summary.replicas_replaced) == (1, 1)
    lost, joined = world.told
    assert (lost["lost"], lost["left"], lost["needed"], lost["successor"]) == ("rollout-0", 1, 1, "rollout-0.1")
    assert "rollout-0 (process 9) died" in lost["error"]
    assert (joined["joined"], joined["instead_of"]) == ("rollout-0.1", "rollout-0")
    newcomer = world.replicas["rollout-0.1"]
    assert min(newcomer.versions) >= joined["version"] > 0, "it had the current version before its first request"
    assert world.states_.keys() == {"rollout-1", "rollout-0.1"}, "the dead one does not count any more"


@pytest.mark.parametrize(("replicas", "quorum", "left"), [(1, 0.5, 0), (2, 1.0, 1), (3, 0.5, 1)])
def test_when_too_few_replicas_are_left_the_run_ends_with_the_last_death(
    replicas: int, quorum: float, left: int
) -> None:
    world = World()
    for number in range(1, replicas):
        world.add(LiveRollout(world, f"rollout-{number}"))
    for number in range(replicas - left):
        world.at_step[2 + 2 * number] = world.replicas[f"rollout-{number}"].gone.set
    with pytest.raises(WorkerDiedError, match=rf"rollout-{replicas - left - 1} \(process 9\) died"):
        run(world, first_is_better, quorum=quorum, max_replacements=0, start_replica=successors(world), steps=1000)
    assert len(world.told) == replicas - left
    assert world.told[-1]["successor"] == ""


def test_successors_can_die_or_fail_to_start_and_are_counted() -> None:
    world = World()
    world.add(LiveRollout(world, "rollout-1"))

    def kill_the_newest() -> None:
        newest = max(name for name in world.replicas if name.startswith("rollout-0"))
        world.replicas[newest].gone.set()

    world.at_step = dict.fromkeys((2, 24), kill_the_newest)
    start_replica = successors(world, failing="rollout-0.2")
    settings = {"start_replica": start_replica, "max_replacements": 2, "event_loop": SimulatedTimeLoop}
    summary = run(world, first_is_better, steps=48, **settings)
    assert Counter(world.trained) == Counter({task.prompt: 8 for task in TASKS})
    told = [facts.get("joined", facts.get("lost")) for facts in world.told]
    assert told == ["rollout-0", "rollout-0.1", "rollout-0.1", "rollout-0.2"]
    assert "could not start" in world.told[-1]["error"]
    assert "no room" in world.told[-1]["error"]
    assert (summary.replicas_lost, summary.replicas_replaced) == (2, 1)


def test_a_replica_out_of_service_gets_no_requests_and_its_tasks_go_to_another() -> None:
    world = World()
    first = world.replicas["rollout-0"]
    world.add(LiveRollout(world, "rollout-1"))
    asked: list[int] = []

    def quarantine() -> None:
        first.quarantined = True  # and the coordinator learns it a little later
        asyncio.get_running_loop().call_later(0.01, settle)

    def settle() -> None:
        world.states_["rollout-0"] = ReplicaState.QUARANTINED
        first.quarantined = False
        asked.append(len(first.versions))

    world.at_step[3] = quarantine
    run(world, first_is_better, steps=60, event_loop=SimulatedTimeLoop)
    assert Counter(world.trained) == Counter({task.prompt: 10 for task in TASKS})
    assert world.told == []
    assert world.states_["rollout-0"] is ReplicaState.SERVING, "the next version healed it"
    assert len(first.versions) > asked[0], "and it was asked again"


def test_a_replica_that_could_not_commit_a_version_is_sent_it_once_more_during_the_next_step() -> None:
    synced: list[int] = []

    class Failing(World):
        async def sync(self, version: int) -> SyncReport:
            synced.append(version)
            report = await super().sync(version)
            if synced != [0, 1, 2, 3]:
                return report
            self.states_["rollout-0"] = ReplicaState.QUARANTINED
            failed = ReplicaReport(Outcome.QUARANTINED, PeerLostError("lost.", part="rollout-0"))
            return replace(report, replicas={**report.replicas, "rollout-0": failed})

    world = Failing(step_s=100.0)
    world.add(LiveRollout(world, "rollout-1"))
    run(world, first_is_better, event_loop=SimulatedTimeLoop)
    assert synced == [0, 1, 2, 3, 3, 4, 5, 6]
    assert world.published_versions == [0, 1, 2, 3, 4, 5, 6], "nothing was published for it"


def test_when_nobody_serves_and_nobody_can_be_healed_the_run_ends() -> None:
    world = World()

    def quarantine() -> None:
        world.states_["rollout-0"] = ReplicaState.QUARANTINED
        world.aborts += [*range(20)] * 9

    world.at_step[3] = quarantine
    with pytest.raises(SyncAbortedError, match="the connection was reset"):
        run(world, first_is_better, steps=60, event_loop=SimulatedTimeLoop)
