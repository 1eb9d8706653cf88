"""A trainer, replicas and a syncer of the loop that live in one process, and a run of the loop with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn, cast

from waiting import HANG_S

from weightlane.ckpt_engines import (
    ClosedError,
    PeerLostError,
    QuarantinedError,
    SyncAbortedError,
    WeightlaneError,
    WorkerDiedError,
)
from weightlane.plugins import hookimpl, make_hooks
from weightlane.sync import Outcome, ReplicaReport, ReplicaState, SyncReport
from weightlane.trainer.data.batch import MiniBatch, TokenBatch
from weightlane.trainer.data.sequences import IGNORED, TokenSequence
from weightlane.trainer.data.step_result import StepResult
from weightlane.trainer.data.tasks import Task
from weightlane.trainer.loop.config import LoopConfig
from weightlane.trainer.loop.fleet import Fleet
from weightlane.trainer.loop.loop import AsyncLoop
from weightlane.trainer.loop.prompt_group import PromptGroup
from weightlane.trainer.loop.protocols import (
    Judge,
    LoopParts,
    LoopState,
    Played,
    Rollout,
    Syncer,
    Trajectory,
    Turn,
)
from weightlane.trainer.loop.summary import RunSummary
from weightlane.trainer.objectives.config import AlgorithmConfig

ALGORITHM = AlgorithmConfig(prompts_per_step=2, group_size=3, max_new_tokens=4)
TASKS = [Task(f"task-{number}", "") for number in range(12)]
HELDOUT = {"": [Task("held-out", "")]}


class Characters:
    """A tokenizer: a character is its code point."""

    def encode(self, text: str, *, within: bool = False) -> Sequence[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def as_chat(self, messages: Sequence[Mapping[str, Any]], *, answered: bool = False, **options: Any) -> str:
        text = "".join(f"<{each['role']}>{each['content']}\0" for each in messages)
        return f"{len(options.get('tools') or [])} tools{text}<assistant>"


PUBLISH_S, BLOCKED_S = 0.25, 0.5
"""Seconds for which one version blocks the trainer, and each replica."""


def prompt_of(sequence: TokenSequence) -> tuple[int, ...]:
    """Tokens read before the first target."""
    first = int((sequence.targets != IGNORED).nonzero()[0])
    return tuple(sequence.tokens[: first + 1].tolist())


@dataclass
class World:
    """Trainers, rollouts and a syncer that share what they know; any of them can be made to fail."""

    version: int = 0
    step: int = 0
    in_step: bool = False
    step_s: float = 0.001
    sync_s: float = 0.002
    published: int = -1
    trained: list[str] = field(default_factory=list)
    batches: list[TokenBatch] = field(default_factory=list)
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
    """Bad answers by prompt; each replaces the prompt's first completion, once."""
    skips: set[int] = field(default_factory=set)
    """Calls of `train_step`, from 0, that change nothing."""
    calls: int = 0
    log: list[str] = field(default_factory=list)
    """Log of versions published, states saved and steps exported, in order."""
    evaluations: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    samples: list[tuple[int, list[Mapping[str, Any]]]] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    """Versions that are aborted, as often as they stand here."""
    here: set[str] = field(default_factory=set)
    """Parts of the trainers and the replicas that are on the device, if they share one."""
    together: set[frozenset[str]] = field(default_factory=set)
    """All that `here` has been."""
    turns: list[str] = field(default_factory=list)
    fleet: Fleet = field(init=False, repr=False, compare=False)
    """The fleet of the run."""

    def __post_init__(self) -> None:
        self.add(LiveRollout(self, "rollout-0"))

    @property
    def published_versions(self) -> list[int]:
        """Every version that was published, in order."""
        return [int(line.split()[1]) for line in self.log if line.startswith("published")]

    def moved(self, *, here: Sequence[str] = (), away: Sequence[str] = ()) -> None:
        """Note what has moved onto the device that trainers and replicas share, and what has left it before."""
        self.here = (self.here - set(away)) | set(here)
        self.together.add(frozenset(self.here))

    async def offload(self) -> None:
        self.moved(away=["parameters", "optimizer"])

    async def memory_use(self) -> Mapping[str, tuple[int, int]]:
        return {"trainer-0": (1, 2)}

    def weights_lost(self, name: str) -> None:
        if self.states_[name] is ReplicaState.SERVING:
            self.states_[name] = ReplicaState.JOINING

    @hookimpl
    def turn_ended(self, turn: str, facts: Mapping[str, Any]) -> None:
        assert facts["peak_bytes"].keys() == {"trainer-0", *(f"{name}/0" for name in self.replicas)}
        self.turns.append(turn)

    async def train_step(self, batch: TokenBatch, mini_batches: Sequence[MiniBatch]) -> StepResult:
        self.calls += 1
        self.moved(here=["parameters", "optimizer"])
        if self.calls - 1 in self.skips:
            return StepResult(self.step, skipped="the gradient norm is nan.")
        if self.step == self.fails_at_step:
            if self.failure_is_a_death:
                asyncio.get_running_loop().call_later(0.01, self.dies.set)
            raise PeerLostError("the connection was reset.", part="gloo")
        self.batches.append(batch)
        self.trained += dict.fromkeys("".join(map(chr, prompt_of(sequence))) for sequence in batch.sequences)
        self.in_step = True
        await asyncio.sleep(self.step_s)
        self.in_step = False
        self.step += 1
        self.at_step.pop(self.step, lambda: None)()
        # Optimizer steps, of which a version may have several.
        return StepResult(2 * self.step, metrics={"sequences": float(len(batch))})

    async def publish(self, version: int) -> float:
        assert not self.in_step, "it may be changing the parameters"
        assert version == self.step, "the parameters are those of the version that is published"
        self.published = version
        self.moved(here=["parameters"], away=["optimizer"])
        self.log.append(f"published {version}")
        return PUBLISH_S

    async def save_loop(self, state: LoopState) -> None:
        self.moved(here=["parameters", "optimizer"])
        self.saved.append(state)
        self.log.append(f"saved {state.step}")

    async def export(self, step: int) -> None:
        assert step == self.step
        self.moved(here=["parameters"])
        self.log.append(f"exported {step}")

    async def watch(self) -> NoReturn:
        await self.dies.wait()
        raise WorkerDiedError("trainer rank 1 (process 7) died.", part="trainer ranks", peer="trainer-1")

    async def sync(self, version: int) -> SyncReport:
        await asyncio.sleep(self.sync_s)
        assert version == self.published
        assert all("weights" not in replica.asleep for replica in self.replicas.values())
        if version in self.aborts:
            self.aborts.remove(version)
            raise SyncAbortedError.because(version, PeerLostError("the connection was reset.", part="gloo"))
        before, self.version = self.version, version
        reports = {}
        for name, state in self.states_.items():
            if state is not ReplicaState.LOST and not (state is ReplicaState.SERVING and version == before):
                self.replicas[name].version = version
                self.states_[name] = ReplicaState.SERVING
                reports[name] = ReplicaReport(Outcome.COMMITTED, blocked_s=BLOCKED_S)
        return SyncReport(version, self.sync_s, 0, reports)

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
    def replica_left(self, replica: str, facts: Mapping[str, Any]) -> None:
        self.told.append({"left": replica, **facts})

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
        self.asleep: set[str] = set()
        self.flying = 0
        self.gone = asyncio.Event()
        self.closed = False

    @property
    def death(self) -> WorkerDiedError:
        return WorkerDiedError(f"{self.name} (process 9) died.", part="rollout replica", peer=self.name)

    async def generate_group(
        self, prompt_ids: Sequence[int], *, count: int, max_new_tokens: int, **_: Any
    ) -> Sequence[Any]:
        version = self.version
        if self.asleep:
            raise QuarantinedError("the replica is asleep.", part=self.name)
        self.versions.append(version)
        self.flying += 1
        assert self.world.states_[self.name] is not ReplicaState.JOINING, "it has no version of this run yet"
        await asyncio.sleep(0.001)
        self.flying -= 1
        self.raise_if_ended()
        if self.quarantined:
            raise QuarantinedError("not now.", part=self.name)
        each = {"logprobs": [-1.0] * max_new_tokens, "versions": [version] * max_new_tokens}
        answers = [SimpleNamespace(token_ids=[65 + n] * max_new_tokens, **each) for n in range(count)]
        bad = self.world.bad_answers.pop("".join(map(chr, prompt_ids)), None)
        return answers if bad is None else [bad, *answers[1:]]

    async def sleep(self) -> None:
        self.asleep, self.version = {"weights", "caches"}, -1
        while self.flying:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.0005)
        if self.gone.is_set():
            raise self.death
        self.world.moved(away=["weights", "caches"])

    async def wake(self, part: str) -> None:
        if self.gone.is_set():
            raise self.death
        self.asleep.discard(part)
        self.world.moved(here=[part])

    async def memory_use(self) -> Sequence[tuple[int, int]]:
        return [(3, 4)]

    def raise_if_ended(self) -> None:
        if self.closed:
            raise ClosedError("the replica is not running.", part=self.name)
        if self.gone.is_set():
            raise self.death

    async def close(self) -> None:
        self.closed = True
        self.gone.set()

    async def stats(self) -> Any:
        return SimpleNamespace(max_token_gap_s=0.0, tokens=0, recomputed_tokens=0)

    async def watch(self) -> NoReturn:
        await self.gone.wait()
        raise self.death


def loop_of(
    world: World,
    judge: Callable[[str, Mapping[str, Any]], float],
    *,
    resume: LoopState | None = None,
    colocate: bool = False,
    tasks: Sequence[Task] = TASKS,
    heldout: Mapping[str, Sequence[Task]] = HELDOUT,
    algorithm: AlgorithmConfig = ALGORITHM,
    concurrency: int = 2 * ALGORITHM.group_size,
    curriculum: bool = False,
    **config: Any,
) -> AsyncLoop:
    """A loop with the parts of `world`. `config` are fields of `LoopConfig` and further ones of `LoopParts`."""
    of_parts = {name: config.pop(name) for name in list(config) if name in LoopParts.__dataclass_fields__}
    loop = AsyncLoop(
        LoopParts(
            trainers=world,
            rollouts=cast("Sequence[Rollout]", list(world.replicas.values())),
            syncer=cast("Syncer", world),
            tokenizer=Characters(),
            stop_token_ids=[0],
            judge=judging(judge),
            train_tasks=tasks,
            heldout_tasks=heldout,
            hooks=make_hooks([world]),
            save=world.save_loop,
            export=world.export,
            shared=world if colocate else None,
            **{"quorum": 0.5, "max_replacements": 3, **of_parts},
        ),
        LoopConfig(**{"steps": 6, **config}),
        algorithm,
        seed=0,
        concurrency=concurrency,
        resume=resume,
        curriculum=curriculum,
    )
    world.fleet = loop.fleet
    return loop


def run(
    world: World,
    judge: Callable[[str, Mapping[str, Any]], float],
    *,
    event_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    **settings: Any,
) -> RunSummary:
    loop = loop_of(world, judge, **settings)
    with asyncio.Runner(loop_factory=event_loop) as runner:
        return runner.run(asyncio.wait_for(loop.run(), HANG_S) if event_loop is None else loop.run())


def judging(judge: Callable[[str, Mapping[str, Any]], float]) -> Judge:
    """`judge`, as the loop calls it."""

    async def called(completion: str, task: Mapping[str, Any]) -> float:
        return judge(completion, task)

    return called


def first_is_better(completion: str, task: Mapping[str, Any]) -> float:
    return float(completion.startswith("A"))


def group_of(versions: Sequence[Sequence[int]], rewards: Sequence[float]) -> PromptGroup:
    """A group of completions of one turn whose tokens have these versions, and log-probabilities -1, -2 and so on."""
    completions = [
        SimpleNamespace(token_ids=[7] * len(each), logprobs=[-float(n + 1) for n in range(len(each))], versions=each)
        for each in versions
    ]
    episodes = [
        Played(Trajectory((Turn([3], cast("Any", each)),)), reward=reward)
        for each, reward in zip(completions, rewards, strict=True)
    ]
    return PromptGroup(Task("p", ""), episodes, "rollout-0")
