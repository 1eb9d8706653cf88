"""The loop with parts that live in this process: what ends a run, and which tasks it uses."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from waiting import HANG_S, NEVER_S

from weightlane.ckpt_engines import (
    ConfigError,
    DeadlineExceededError,
    PeerLostError,
    QuarantinedError,
    RewardError,
    SyncAbortedError,
    TooManyFailuresError,
    WeightlaneError,
    WorkerDiedError,
)
from weightlane.plugins import hookimpl, make_hooks
from weightlane.sync import Outcome, ReplicaReport, ReplicaState, SyncReport
from weightlane.trainer.config import AlgorithmConfig
from weightlane.trainer.data.batch import TrainBatch
from weightlane.trainer.data.rewards import Reward
from weightlane.trainer.data.tasks import Task
from weightlane.trainer.loop.config import LoopConfig
from weightlane.trainer.loop.failures import Failures
from weightlane.trainer.loop.fleet import Successor
from weightlane.trainer.loop.loop import AsyncLoop, LoopParts
from weightlane.trainer.loop.protocols import Newcomer, Rollout, StepReport, Syncer
from weightlane.trainer.loop.rollout_feeder import Judge
from weightlane.trainer.loop.state import LoopState
from weightlane.trainer.loop.summary import RunSummary

ALGORITHM = AlgorithmConfig(prompts_per_step=2, group_size=3, max_new_tokens=4)
TASKS = [Task(f"task-{number}", "") for number in range(12)]


class Characters:
    """A tokenizer: a character is its code point."""

    def encode(self, text: str) -> Sequence[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


PUBLISH_S, BLOCKED_S = 0.25, 0.5
"""What a version costs the trainer and each replica."""


@dataclass
class World:
    """Trainers, rollouts and a syncer that share what they know; any of them can be made to fail."""

    version: int = 0
    step: int = 0
    published: int = -1
    trained: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    saved: list[LoopState] = field(default_factory=list)
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    """Facts of every step."""
    staleness: list[int] = field(default_factory=list)
    fails_at_step: int = -1
    failure_is_a_death: bool = True
    dies: asyncio.Event = field(default_factory=asyncio.Event)
    replicas: dict[str, LiveRollout] = field(default_factory=dict)
    states_: dict[str, ReplicaState] = field(default_factory=dict)
    told: list[Mapping[str, Any]] = field(default_factory=list)
    """Facts of replicas that were lost and that joined."""
    at_step: dict[int, Callable[[], None]] = field(default_factory=dict)
    failures: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    bad_answers: dict[str, Any] = field(default_factory=dict)
    """By prompt, what is answered once in the place of its first completion."""
    skips: set[int] = field(default_factory=set)
    """Calls of `train_step`, from 0, that change nothing."""
    calls: int = 0
    log: list[str] = field(default_factory=list)
    """What was published and saved, in this order."""
    evaluations: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    samples: list[tuple[int, list[Mapping[str, Any]]]] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    """Versions that are aborted, as often as they stand here."""

    def __post_init__(self) -> None:
        self.add(LiveRollout(self, "rollout-0"))

    async def train_step(self, batch: TrainBatch) -> StepReport:
        self.calls += 1
        if self.calls - 1 in self.skips:
            return StepReport(self.step, skipped="the gradient norm is nan.")
        if self.step == self.fails_at_step:
            if self.failure_is_a_death:
                asyncio.get_running_loop().call_later(0.01, self.dies.set)
            raise PeerLostError("the connection was reset.", part="gloo")
        self.trained += dict.fromkeys("".join(map(chr, sample.prompt_ids)) for sample in batch.samples)
        await asyncio.sleep(0.001)
        self.step += 1
        self.at_step.pop(self.step, lambda: None)()
        return StepReport(self.step)

    async def publish(self, version: int) -> float:
        assert version == self.step, "the parameters are those of the version that is published"
        self.published = version
        self.log.append(f"published {version}")
        return PUBLISH_S

    async def save_loop(self, state: LoopState) -> None:
        self.saved.append(state)
        self.log.append(f"saved {state.step}")

    async def export(self, step: int) -> None:
        assert step == self.step
        self.log.append(f"exported {step}")

    async def watch(self) -> NoReturn:
        await self.dies.wait()
        raise WorkerDiedError("trainer rank 1 (process 7) died.", part="trainer group", peer="trainer-1")

    async def sync(self, version: int) -> SyncReport:
        await asyncio.sleep(0.002)
        assert version == self.published
        if version in self.aborts:
            self.aborts.remove(version)
            raise SyncAbortedError.because(version, PeerLostError("the connection was reset.", part="gloo"))
        self.version = version
        reports = {}
        for name, state in self.states_.items():
            if state is not ReplicaState.LOST:
                self.replicas[name].version = version
                self.states_[name] = ReplicaState.SERVING
                reports[name] = ReplicaReport(Outcome.COMMITTED, blocked_s=BLOCKED_S)
        return SyncReport(version, 0.002, 0, reports)

    def states(self) -> Mapping[str, ReplicaState]:
        return self.states_

    def participant_lost(self, error: WeightlaneError, replica: str = "") -> None:
        self.states_[replica] = ReplicaState.LOST

    def add(self, replica: LiveRollout) -> None:
        self.replicas[replica.name] = replica
        self.states_[replica.name] = ReplicaState.JOINING

    def remove(self, name: str) -> None:
        del self.states_[name]

    @hookimpl
    def replica_lost(self, replica: str, facts: Mapping[str, Any]) -> None:
        self.told.append({"lost": replica, **facts})

    @hookimpl
    def replica_joined(self, replica: str, facts: Mapping[str, Any]) -> None:
        self.told.append({"joined": replica, **facts})

    @hookimpl
    def training_step(self, step: int, facts: Mapping[str, Any]) -> None:
        self.staleness.append(facts["staleness_max"])
        self.steps.append(facts)

    @hookimpl
    def evaluated(self, step: int, facts: Mapping[str, Any]) -> None:
        self.evaluations.append((step, facts))

    @hookimpl
    def samples_trained(self, step: int, facts: Mapping[str, Any]) -> None:
        self.samples.append((step, facts["samples"]))

    @hookimpl
    def item_failed(self, kind: str, facts: Mapping[str, Any]) -> None:
        self.failures.append((kind, facts))

    @hookimpl
    def run_ended(self, facts: Mapping[str, Any]) -> None:
        self.events.append(facts.get("error", "well"))


class LiveRollout:
    """A replica: answers with the version it has until it dies or is quarantined."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.version = -1
        self.versions: list[int] = []
        self.quarantined = False
        self.gone = asyncio.Event()

    @property
    def death(self) -> WorkerDiedError:
        return WorkerDiedError(f"{self.name} (process 9) died.", part="rollout replica", peer=self.name)

    async def generate_group(
        self, prompt_ids: Sequence[int], *, count: int, max_new_tokens: int, **_: Any
    ) -> Sequence[Any]:
        version = self.version
        self.versions.append(version)
        assert self.world.states_[self.name] is not ReplicaState.JOINING, "it has no version of this run yet"
        await asyncio.sleep(0.001)
        if self.gone.is_set():
            raise self.death
        if self.quarantined:
            raise QuarantinedError("not now.", part=self.name)
        each = {"logprobs": [-1.0] * max_new_tokens, "versions": [version] * max_new_tokens}
        answers = [SimpleNamespace(token_ids=[65 + n] * max_new_tokens, **each) for n in range(count)]
        bad = self.world.bad_answers.pop("".join(map(chr, prompt_ids)), None)
        return answers if bad is None else [bad, *answers[1:]]

    async def stats(self) -> Any:
        return SimpleNamespace(max_token_gap_s=0.0)

    async def watch(self) -> NoReturn:
        await self.gone.wait()
        raise self.death


def run(
    world: World,
    judge: Callable[[str, Mapping[str, Any]], float],
    *,
    resume: LoopState | None = None,
    quorum: float = 0.5,
    succeed: Successor | None = None,
    max_successors: int = 3,
    max_model_len: int = 0,
    **config: Any,
) -> RunSummary:
    loop = AsyncLoop(
        LoopParts(
            trainers=world,
            rollouts=cast("Sequence[Rollout]", list(world.replicas.values())),
            syncer=cast("Syncer", world),
            tokenizer=Characters(),
            stop_token_ids=[0],
            judge=judging(judge),
            train_tasks=TASKS,
            heldout_tasks=[Task("held-out", "")],
            hooks=make_hooks([world]),
            save=world.save_loop,
            export=world.export,
            quorum=quorum,
            succeed=succeed,
            max_successors=max_successors,
            max_model_len=max_model_len,
        ),
        LoopConfig(**{"steps": 6, **config}),
        ALGORITHM,
        seed=0,
        concurrency=2 * ALGORITHM.group_size,
        resume=resume,
    )
    return asyncio.run(asyncio.wait_for(loop.run(), HANG_S))


def judging(judge: Callable[[str, Mapping[str, Any]], float]) -> Judge:
    """`judge`, as the loop calls it."""

    async def called(completion: str, task: Mapping[str, Any]) -> float:
        return judge(completion, task)

    return called


def first_is_better(completion: str, task: Mapping[str, Any]) -> float:
    return float(completion.startswith("A"))


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_run_trains_every_task_once_per_epoch_within_the_staleness_bound(max_staleness: int) -> None:
    world = World()
    summary = run(world, first_is_better, max_staleness=max_staleness)
    assert sorted(world.trained) == sorted(task.prompt for task in TASKS), "six steps of two are one epoch"
    assert max(world.staleness) <= max_staleness
    assert world.version == 6, "the last version serves"
    assert summary.accuracy_before == summary.accuracy_after == 1.0
    assert world.events == ["well"]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_that_is_resumed_uses_every_task_that_was_not_trained_on_and_none_twice(max_staleness: int) -> None:
    world = World()
    run(world, first_is_better, max_staleness=max_staleness, steps=4, save_every=3)
    for state in world.saved:
        again = World(step=state.step)
        resumed = LoopState.from_plain(state.to_plain())
        run(again, first_is_better, max_staleness=max_staleness, steps=6, resume=resumed)
        used = Counter(world.trained[: 2 * state.step] + again.trained)
        assert used == Counter(task.prompt for task in TASKS)
        assert again.version == 6


def test_a_run_whose_rewards_are_no_numbers_ends_when_too_many_samples_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nan_of_loop_test.py").write_text("def judge(completion, task):\n    return float('nan')\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("weightlane.trainer.loop.loop._DEATH_NOTICE_S", 0.02)
    world = World()
    with pytest.raises(TooManyFailuresError, match=r"11 of the last 100 samples.*nan_of_loop_test:judge returned nan"):
        run(world, Reward("nan_of_loop_test:judge", [tmp_path]))
    assert world.failures[0][1]["task"] == "held-out"
    assert [kind for kind, _ in world.failures][:11] == ["reward"] * 11
    assert len(world.events) == 1
    assert "returned nan" in world.events[0]


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
def test_a_state_is_saved_when_its_version_is_on_its_way(max_staleness: int) -> None:
    world = World()
    run(world, first_is_better, max_staleness=max_staleness, save_every=2)
    assert [state.step for state in world.saved] == [2, 4, 6]
    for step in (2, 4, 6):
        assert world.log.index(f"published {step}") < world.log.index(f"saved {step}")


def test_models_are_written_when_their_version_is_on_its_way_and_at_the_end() -> None:
    world = World()
    run(world, first_is_better, save_every=0, export_every=2)
    assert [line for line in world.log if line.startswith("exported")] == ["exported 2", "exported 4", "exported 6"]
    for step in (2, 4, 6):
        assert world.log.index(f"published {step}") < world.log.index(f"exported {step}")


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


def test_versions_that_the_trainer_waits_for_are_timed_and_may_be_aborted_as_others_may() -> None:
    world = World(aborts=[3])  # of 1, 3 and 4
    summary = run(world, first_is_better, blocking_syncs=3, max_staleness=2)
    assert summary.blocking_way_s > 0
    assert summary.versions_aborted == 1
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


# -- what costs a sample or a step only ----------------------------------------------------------------------------------


TOO_LATE = DeadlineExceededError("it took longer than 600 s.", part="rollout-0")
EMPTY = SimpleNamespace(token_ids=[], logprobs=[], versions=[])
NOT_FINITE = SimpleNamespace(token_ids=[66, 67], logprobs=[-1.0, float("nan")], versions=[0, 0])


@pytest.mark.parametrize(
    ("bad", "says"),
    [(TOO_LATE, "longer than 600 s"), (EMPTY, "is empty"), (NOT_FINITE, "not finite")],
    ids=["late", "empty", "not finite"],
)
def test_an_answer_that_cannot_be_used_costs_that_sample(bad: Any, says: str) -> None:
    world = World(bad_answers={"task-3": bad, "task-5": bad, "held-out": bad})
    summary = run(world, some_are_better)
    assert sorted(world.trained) == sorted(task.prompt for task in TASKS), "its group has two samples left"
    assert sorted(facts["task"] for _, facts in world.failures) == ["held-out", "task-3", "task-5"]
    assert all(kind == "request" and says in facts["error"] for kind, facts in world.failures)
    assert summary.failures == {"request": 3}
    assert summary.accuracy_before is None, "the only held-out task was not answered"
    assert summary.accuracy_after is not None


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_what_a_replica_generates_that_missed_versions_is_drawn_anew(max_staleness: int) -> None:
    class Lagging(World):
        async def sync(self, version: int) -> SyncReport:
            had = self.replicas["rollout-1"].version
            report = await super().sync(version)
            if version not in (2, 3, 4):
                return report
            self.replicas["rollout-1"].version = had
            missed = ReplicaReport(Outcome.BEHIND, PeerLostError("late.", part="rollout-1"))
            return replace(report, replicas={**report.replicas, "rollout-1": missed})

    world = Lagging()
    world.add(LiveRollout(world, "rollout-1"))
    run(world, first_is_better, max_staleness=max_staleness, steps=8)
    assert len(world.trained) == 16
    assert max(world.staleness) <= max_staleness
    assert 1 in world.replicas["rollout-1"].versions[4:], "it was asked while it lagged"


def test_one_bad_prompt_or_answer_ends_no_run_however_large_its_group_is() -> None:
    failures = Failures(0.1, make_hooks([]), group_size=16)
    failures.failed("prompt", ConfigError("too long.", part="data"), 16)
    failures.failed("prompt", ConfigError("too long.", part="data"), 1000, may_end=False)
    failures.failed("prompt", ConfigError("too long.", part="data"), 16)
    with pytest.raises(TooManyFailuresError, match="48 of the last 320 samples"):
        failures.failed("prompt", ConfigError("too long.", part="data"), 16)


def test_a_prompt_that_is_no_text_costs_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Characters.encode

    def refuse(self: Characters, text: str) -> list[int]:
        if text in ("task-3", "held-out"):
            raise TypeError("surrogates not allowed")
        return encode(self, text)

    monkeypatch.setattr(Characters, "encode", refuse)
    world = World()
    run(world, first_is_better)
    assert "task-3" not in world.trained
    assert {(kind, facts["task"]) for kind, facts in world.failures} == {("prompt", "task-3"), ("prompt", "held-out")}


def test_an_evaluation_that_fails_beside_the_training_ends_the_run_then() -> None:
    def judge(completion: str, task: Mapping[str, Any]) -> float:
        if task["prompt"] == "held-out" and world.step:
            raise TooManyFailuresError("no reward.", part="judge")
        return first_is_better(completion, task)

    world = World()
    with pytest.raises(TooManyFailuresError):
        run(world, judge, steps=200, evaluate_every=2)
    assert world.step < 200


def some_are_better(completion: str, task: Mapping[str, Any]) -> float:
    """Of any two completions of a prompt one is better."""
    return float("ABC".index(completion[0]))


def test_a_group_of_which_too_little_is_left_is_replaced_by_the_next_task_and_the_bound_holds() -> None:
    def judge(completion: str, task: Mapping[str, Any]) -> float:
        if task["prompt"] in ("task-1", "task-2") and not completion.startswith("A"):
            raise RewardError(f"no reward for {completion}.", part="judge")
        return some_are_better(completion, task)

    world = World()
    summary = run(world, judge, max_staleness=1)
    assert len(world.trained) == 12
    assert not {"task-1", "task-2"} & set(world.trained)
    assert max(world.staleness) <= 1
    assert {facts["task"] for _, facts in world.failures} == {"task-1", "task-2"}
    assert set(summary.failures) == {"reward"}


def test_a_prompt_that_leaves_no_room_costs_its_group_and_is_not_sent() -> None:
    world = World()
    limits = {"max_model_len": len("task-9") + ALGORITHM.max_new_tokens, "max_failed_share": 0.5}
    summary = run(world, first_is_better, **limits)
    assert set(world.trained) == {f"task-{number}" for number in range(10)}, "the others have a letter more"
    assert {kind for kind, _ in world.failures} == {"prompt"}
    assert {facts["task"] for _, facts in world.failures} >= {"task-10", "task-11", "held-out"}
    assert any("the prompt has 7 tokens, and 6 leave room" in facts["error"] for _, facts in world.failures)
    assert summary.accuracy_before is None


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_step_whose_gradient_is_not_finite_costs_its_groups_and_no_version(max_staleness: int) -> None:
    world = World(skips={1, 4})
    summary = run(world, first_is_better, max_staleness=max_staleness)
    assert (world.step, world.calls, world.version) == (6, 8, 6)
    assert [(kind, facts["step"]) for kind, facts in world.failures] == [("step", 2), ("step", 4)]
    assert summary.failures == {"step": 2}
    used = Counter(world.trained) + Counter(prompt for _, facts in world.failures for prompt in facts["tasks"])
    assert used.total() == 16
    assert set(used) == {task.prompt for task in TASKS}
    assert max(world.staleness) <= max_staleness


def test_a_run_whose_steps_change_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlane.trainer.loop.loop._DEATH_NOTICE_S", 0.02)
    world = World(skips=set(range(100)))
    with pytest.raises(TooManyFailuresError, match=r"3 of the last 20 optimizer steps failed.*gradient norm is nan"):
        run(world, first_is_better)
    assert (world.step, world.calls) == (0, 3)


# -- replicas that die --------------------------------------------------------------------------------------------------


def successors(world: World, *, fails: bool = False) -> Successor:
    async def succeed(dead: str, name: str) -> Newcomer:
        await asyncio.sleep(0.01)
        if fails:
            raise ConfigError("no room.", part=name)
        return cast("Newcomer", LiveRollout(world, name))

    return succeed


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_replica_that_dies_is_replaced_and_no_task_is_lost_or_used_twice(max_staleness: int) -> None:
    world = World()
    first, second = world.replicas["rollout-0"], LiveRollout(world, "rollout-1")
    world.add(second)
    world.at_step[2] = first.gone.set
    summary = run(world, first_is_better, succeed=successors(world), max_staleness=max_staleness, steps=120)
    assert Counter(world.trained) == Counter({task.prompt: 20 for task in TASKS})
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
        run(world, first_is_better, quorum=quorum, max_successors=0, succeed=successors(world), steps=1000)
    assert len(world.told) == replicas - left
    assert world.told[-1]["successor"] == ""


def test_a_successor_that_cannot_start_is_reported_and_the_others_go_on() -> None:
    world = World()
    world.add(LiveRollout(world, "rollout-1"))
    world.at_step[2] = world.replicas["rollout-0"].gone.set
    summary = run(world, first_is_better, succeed=successors(world, fails=True), steps=60)
    assert Counter(world.trained) == Counter({task.prompt: 10 for task in TASKS})
    assert (summary.replicas_lost, summary.replicas_replaced) == (1, 0)
    assert [facts["lost"] for facts in world.told] == ["rollout-0", "rollout-0.1"]
    assert "could not start" in world.told[1]["error"]
    assert "no room" in world.told[1]["error"]


def test_successors_can_die_too_and_are_counted() -> None:
    world = World()
    world.add(LiveRollout(world, "rollout-1"))

    def kill_the_newest() -> None:
        newest = max(name for name in world.replicas if name.startswith("rollout-0"))
        world.replicas[newest].gone.set()

    world.at_step = dict.fromkeys((2, 60, 120), kill_the_newest)
    summary = run(world, first_is_better, succeed=successors(world), max_successors=2, steps=180)
    assert Counter(world.trained) == Counter({task.prompt: 30 for task in TASKS})
    assert [facts.get("joined", facts.get("lost")) for facts in world.told] == [
        *("rollout-0", "rollout-0.1", "rollout-0.1", "rollout-0.2", "rollout-0.2")
    ]
    assert (summary.replicas_lost, summary.replicas_replaced) == (3, 2)


def test_a_replica_out_of_service_gets_no_requests_and_its_tasks_go_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlane.trainer.loop.rollout_feeder._PAUSE_S", 0.005)
    world = World()
    first, second = world.replicas["rollout-0"], LiveRollout(world, "rollout-1")
    world.add(second)
    asked: list[int] = []

    def quarantine() -> None:
        first.quarantined = True  # and the coordinator learns it a little later
        asyncio.get_running_loop().call_later(0.01, settle)

    def settle() -> None:
        world.states_["rollout-0"] = ReplicaState.QUARANTINED
        first.quarantined = False
        asked.append(len(first.versions))

    world.at_step[3] = quarantine
    run(world, first_is_better, steps=60)
    assert Counter(world.trained) == Counter({task.prompt: 10 for task in TASKS})
    assert world.told == []
    assert world.states_["rollout-0"] is ReplicaState.SERVING, "the next version healed it"
    assert len(first.versions) > asked[0], "and it was asked again"
