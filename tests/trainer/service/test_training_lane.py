"""`TrainingLane`: which requests are carried out together, which wait for each other, and that nobody waits for long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from waiting import HANG_S

from weightlane.ckpt_engines import ConfigError, WorkerDiedError
from weightlane.trainer.config import LoraConfig
from weightlane.trainer.runner.jobs import Job, OptimStep, Together
from weightlane.trainer.runner.joint_jobs import JointJobs, RunJob
from weightlane.trainer.service.records.checkpoints import Checkpoint
from weightlane.trainer.service.records.futures import Futures
from weightlane.trainer.service.records.models import Model
from weightlane.trainer.service.records.store import Store, StoredRequest
from weightlane.trainer.service.training.operations import BACKWARD, SAVE, STEP, Operations
from weightlane.trainer.service.training.training_lane import TrainingLane

LORA = LoraConfig(rank=2, publish="adapter")
ANY = cast("Any", None)


class Jobs:
    """A runner that notes the adapters of every job, and fails those of `broken`."""

    def __init__(self, broken: str = "") -> None:
        self.seen: list[list[str]] = []
        self._broken = broken

    async def run(self, job: Job[Any]) -> Any:
        parts = list(job.parts) if isinstance(job, Together) else [job]
        self.seen.append([str(getattr(part, "adapter", None) or getattr(part, "name", "")) for part in parts])
        await asyncio.sleep(0)
        results = [ConfigError("broken.", part="x") if each == self._broken else each for each in self.seen[-1]]
        return results if isinstance(job, Together) else results[0]


class World:
    """A lane whose requests run one job each, where they may be joined; it notes the others by their model and kind."""

    def __init__(self, directory: Path, models: str, *, join_wait_s: float = 0.0) -> None:
        directory.mkdir(exist_ok=True)
        self.store, self.jobs = Store(directory / "store.sqlite"), Jobs()
        self.futures = Futures(self.store)
        any_part = cast("Any", None)
        parts = (any_part,) * 6
        operations = Operations(self.futures, *parts, 60.0, trains_weights=False)
        self.lane = TrainingLane(
            self.store,
            self.futures,
            cast("Any", self.jobs),
            any_part,
            self.execute,
            lambda _: True,
            operations.joins,
            directory / "models",
            save_every=100,
            max_queued=100,
            max_loaded=8,
            join_wait_s=join_wait_s,
            trains_weights=False,
        )
        self.models = {name: Model(name, "s", f"client {name}", LORA, {}, next_seq=1, loaded=True) for name in models}
        self.answered: dict[str, Callable[[], None]] = {}
        """Calls to be made when a model has been answered, each once."""
        for model in self.models.values():
            self.lane.add(model)

    async def execute(self, model: Model, request: StoredRequest, run: RunJob) -> None:
        if request.kind in (BACKWARD, STEP):
            await run(OptimStep(f"{model.id} {request.kind}"))
        else:
            self.jobs.seen.append([f"{model.id} {request.kind}"])
        if (then := self.answered.pop(f"{model.id} {request.kind}", None)) is not None:
            then()

    def ask(self, model: str, *kinds: str) -> None:
        for kind in kinds:
            found = self.models[model]
            seq = max([found.next_seq - 1, *found.waiting]) + 1
            self.lane.put(self.futures.accept(kind, model, seq, found.client, b"{}")[0])

    def run(self, until: int, begin: Callable[[], None] = lambda: None) -> list[list[str]]:
        """The jobs that ran until there were so many."""

        async def live() -> None:
            lane = asyncio.create_task(self.lane.run())
            begin()
            async with asyncio.timeout(HANG_S):
                while len(self.jobs.seen) < until:  # noqa: ASYNC110 - the lane's own steps change it
                    await asyncio.sleep(0.001)
            self.lane.close()
            await asyncio.wait_for(lane, HANG_S)

        asyncio.run(live())
        return self.jobs.seen


def named(kind: str, models: str) -> list[str]:
    return [f"{model} {kind}" for model in models]


def test_passes_that_wait_are_joined_and_so_are_steps_but_no_model_that_is_not_on_the_ranks(tmp_path: Path) -> None:
    world = World(tmp_path, "abcd")
    world.models["d"].loaded = False
    for model in "abcd":
        world.ask(model, BACKWARD, STEP)
    world.ask("a", SAVE)
    seen = world.run(5)
    assert seen[0] == named(BACKWARD, "abc")
    assert named(STEP, "abc") in seen
    assert [["d " + kind] in seen for kind in (BACKWARD, STEP)] == [True, True]
    assert ["a " + SAVE] in seen


def test_a_pass_waits_for_a_model_that_was_answered_just_now_and_goes_alone_when_none_comes(tmp_path: Path) -> None:
    world = World(tmp_path / "waits", "ab", join_wait_s=10 * HANG_S)
    world.answered = {
        f"a {STEP}": lambda: asyncio.get_running_loop().call_later(0.05, world.ask, "a", BACKWARD) and None,
    }
    world.ask("a", STEP)
    world.ask("b", SAVE, BACKWARD)
    assert world.run(3)[-1] in (named(BACKWARD, "ba"), named(BACKWARD, "ab"))

    world = World(tmp_path / "alone", "ab", join_wait_s=0.05)
    world.ask("a", STEP)
    world.ask("b", SAVE, BACKWARD)
    assert world.run(3)[-1] == named(BACKWARD, "b")


def test_steps_go_before_a_pass_once_however_many_there_are(tmp_path: Path) -> None:
    world = World(tmp_path, "ab")
    world.ask("b", *[STEP] * 20)
    world.ask("a", BACKWARD)
    assert named(BACKWARD, "a") in world.run(3)


def test_a_pass_is_not_kept_waiting_by_a_client_that_asks_for_steps_again_and_again(tmp_path: Path) -> None:
    """Its wait for late ones begins anew with each answer; only so many may be given meanwhile."""
    world = World(tmp_path, "ab", join_wait_s=10 * HANG_S)

    def again() -> None:
        world.answered[f"b {STEP}"] = again
        asyncio.get_running_loop().call_later(0.01, world.ask, "b", STEP)

    world.answered = {f"b {STEP}": again}
    world.ask("b", STEP)
    world.ask("a", BACKWARD)
    assert named(BACKWARD, "a") in world.run(4)


async def all_of(*tasks: Awaitable[Any]) -> list[Any]:
    async with asyncio.timeout(HANG_S):
        return await asyncio.gather(*tasks, return_exceptions=True)


def test_joint_jobs_wait_for_every_task_that_has_not_left_and_errors_are_those_of_their_own() -> None:
    async def live() -> None:
        jobs = Jobs(broken="b")
        joint = JointJobs(cast("Any", jobs), 4)
        calls = [asyncio.create_task(joint.run(OptimStep(name))) for name in "abc"]
        await asyncio.sleep(0.01)
        assert jobs.seen == []
        calls[2].cancel()  # its task ends, but what it asked for may run
        joint.leave()
        first, second, third = await all_of(*calls)
        assert (first, type(second), type(third)) == ("a", ConfigError, asyncio.CancelledError)
        assert jobs.seen == [["a", "b", "c"]]
        joint.leave()
        joint.leave()
        assert await all_of(joint.run(OptimStep("d"))) == ["d"]
        assert jobs.seen[1:] == [["d"]], "alone, it is no joint job"

    asyncio.run(live())


def test_the_death_of_a_rank_ends_the_lane_and_every_request_stays_queued(tmp_path: Path) -> None:
    world = World(tmp_path, "ab")

    async def die(job: Job[Any]) -> Any:
        raise WorkerDiedError("the trainer rank died.", part="trainer rank 0")

    world.jobs.run = die  # type: ignore[method-assign]
    for model in "ab":
        world.ask(model, BACKWARD)
    with pytest.raises(WorkerDiedError):
        asyncio.run(asyncio.wait_for(world.lane.run(), HANG_S))
    for request in world.store.requests_since("a", 0) + world.store.requests_since("b", 0):
        assert request.state == "queued"


def test_adapters_and_all_weights_are_not_taken_for_each_other(tmp_path: Path) -> None:
    def lane(store: Store, name: str, *, trains_weights: bool) -> TrainingLane:
        parts = ANY, ANY, ANY, ANY, ANY, ANY, tmp_path / name
        limits = {"save_every": 1, "max_queued": 1, "max_loaded": 1, "join_wait_s": 0.0}
        return TrainingLane(store, *parts, **limits, trains_weights=trains_weights)  # type: ignore[arg-type]

    for config, trains_weights in ((LORA, True), (None, False)):
        name = f"{trains_weights}"
        store = Store(tmp_path / f"{name}.sqlite")
        lane(store, name, trains_weights=not trains_weights).add(Model("m", "s", "c", config, {}))
        assert lane(store, name, trains_weights=not trains_weights).resume() == 1
        with pytest.raises(ConfigError, match=r"files have models that are .* service\.trains"):
            lane(store, name, trains_weights=trains_weights).resume()
        store.close()
        operations = Operations(*(ANY,) * 7, 60.0, trains_weights=trains_weights)
        about = {"config": config and config.model_dump(mode="json")}
        found = Checkpoint("tinker://m/weights/a", "m", "training", tmp_path, 0.0, None, 0, about)
        with pytest.raises(ConfigError, match="which this service does not train"):
            operations.check_kind(found)
