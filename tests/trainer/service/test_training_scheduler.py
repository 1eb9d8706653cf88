"""`TrainingScheduler`: requests that are computed together, that wait for each other, and that the death of a process fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import HANG_S, NEVER_S

from weightlane.ckpt_engines import ConfigError, PeerLostError, WeightlaneError
from weightlane.trainer.config import LoraConfig
from weightlane.trainer.runner.job_joiner import JobJoiner, RunJob
from weightlane.trainer.runner.jobs import Job, JointJob, OptimStep
from weightlane.trainer.service.config import ServiceConfig
from weightlane.trainer.service.records import futures as futures_module
from weightlane.trainer.service.records.checkpoints import Checkpoint
from weightlane.trainer.service.records.futures import Futures
from weightlane.trainer.service.records.models import BACKWARD, SAVE, SAVE_FOR_SAMPLER, STEP, Model
from weightlane.trainer.service.records.store import Store, StoredRequest
from weightlane.trainer.service.training import scheduler as scheduler_module
from weightlane.trainer.service.training.operations import Operations
from weightlane.trainer.service.training.scheduler import TrainingScheduler

LORA = LoraConfig(rank=2, publish="adapter")
ANY = cast("Any", None)
RESET = PeerLostError("the connection was reset.", part="gloo")


class Jobs:
    """A runner that notes the adapters of every job, and fails those of `broken`."""

    def __init__(self, broken: str = "") -> None:
        self.seen: list[list[str]] = []
        self._broken = broken

    async def run(self, job: Job[Any]) -> Any:
        parts = list(job.parts) if isinstance(job, JointJob) else [job]
        self.seen.append([str(getattr(part, "adapter", None) or getattr(part, "name", "")) for part in parts])
        await asyncio.sleep(0)
        results = [ConfigError("broken.", part="x") if each == self._broken else each for each in self.seen[-1]]
        return results if isinstance(job, JointJob) else results[0]


class World:
    """A scheduler whose requests run one job each, where they may be joined; it notes the others by their model and kind.

    With an `error`, all of its requests and publications fail by it.
    """

    def __init__(
        self, directory: Path, models: str, *, join_wait_s: float = 0.0, error: WeightlaneError | None = None
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.store, self.jobs, self.error = Store(directory / "store.sqlite"), Jobs(), error
        self.futures = Futures(self.store)
        publications = cast("Any", SimpleNamespace(begin=self.begin, finish=self.fail, busy=False))
        config = ServiceConfig(save_every=100, max_queued=100, max_loaded=8, join_wait_s=join_wait_s)
        self.operations = Operations(self.futures, ANY, ANY, ANY, publications, ANY, config)
        self.operations.samplers = cast("Any", SimpleNamespace(create=lambda *_, **__: None))
        jobs, execute = cast("Any", self.jobs), self.execute if error is None else self.fail
        self.scheduler = self.operations.scheduler = TrainingScheduler(
            self.store, self.futures, jobs, ANY, publications, execute, directory / "models", config
        )
        self.models = {name: Model(name, "s", f"client {name}", LORA, {}, next_seq=1, loaded=True) for name in models}
        self.answered: dict[str, Callable[[], None]] = {}
        """Calls to be made when a model has been answered, each once."""
        for model in self.models.values():
            self.scheduler.add(model)

    async def begin(self, *_: Any) -> None:
        return None

    async def fail(self, *_: Any) -> None:
        assert self.error is not None
        raise self.error

    async def execute(self, model: Model, request: StoredRequest, run: RunJob) -> None:
        if request.kind in (BACKWARD, STEP):
            await run(OptimStep(f"{model.id} {request.kind}"))
        else:
            self.jobs.seen.append([f"{model.id} {request.kind}"])
        if (then := self.answered.pop(f"{model.id} {request.kind}", None)) is not None:
            then()

    def ask(self, model: str, *kinds: str) -> None:
        for kind in kinds:
            self.scheduler.put(self.accept(model, kind))

    def accept(self, model: str, kind: str, /, **body: Any) -> StoredRequest:
        found = self.models[model]
        seq = max([found.next_seq - 1, *found.waiting]) + 1
        payload = json.dumps({"model_id": model, "seq_id": seq, **body}).encode()
        return self.futures.accept(kind, model, seq, found.client, payload)[0]

    def state(self, request: StoredRequest) -> str:
        found = self.store.request(request.id)
        assert found is not None
        return found.state

    def run(self, until: int, begin: Callable[[], None] = lambda: None) -> list[list[str]]:
        """The jobs that ran until there were so many."""

        async def live() -> None:
            scheduler = asyncio.create_task(self.scheduler.run())
            begin()
            async with asyncio.timeout(HANG_S):
                while len(self.jobs.seen) < until:  # noqa: ASYNC110 - the scheduler's own steps change it
                    await asyncio.sleep(0.001)
            self.scheduler.close()
            await asyncio.wait_for(scheduler, HANG_S)

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
    for alone in ("d " + BACKWARD, "d " + STEP, "a " + SAVE):
        assert [alone] in seen


def test_a_pass_waits_for_a_model_that_was_answered_just_now_and_goes_alone_when_none_comes(tmp_path: Path) -> None:
    world = World(tmp_path / "waits", "ab", join_wait_s=10 * HANG_S)
    world.answered = {
        f"a {STEP}": lambda: asyncio.get_running_loop().call_later(0.05, world.ask, "a", BACKWARD) and None
    }
    world.ask("a", STEP)
    world.ask("b", SAVE, BACKWARD)
    assert world.run(3)[-1] in (named(BACKWARD, "ba"), named(BACKWARD, "ab"))

    world = World(tmp_path / "alone", "ab", join_wait_s=0.05)
    world.ask("a", STEP)
    world.ask("b", SAVE, BACKWARD)
    assert world.run(3)[-1] == named(BACKWARD, "b")


def test_a_pass_is_not_kept_waiting_by_steps_however_many_are_asked_for_again_and_again(tmp_path: Path) -> None:
    world = World(tmp_path / "many", "ab")
    world.ask("b", *[STEP] * 20)
    world.ask("a", BACKWARD)
    assert named(BACKWARD, "a") in world.run(3)

    world = World(tmp_path / "again", "ab", join_wait_s=10 * HANG_S)

    def again() -> None:  # each answer makes the pass wait for late ones anew
        world.answered[f"b {STEP}"] = again
        asyncio.get_running_loop().call_later(0.01, world.ask, "b", STEP)

    world.answered = {f"b {STEP}": again}
    world.ask("b", STEP)
    world.ask("a", BACKWARD)
    assert named(BACKWARD, "a") in world.run(4)


def test_joint_jobs_wait_for_every_task_that_has_not_left_and_errors_are_those_of_their_own() -> None:
    async def live() -> None:
        jobs = Jobs(broken="b")
        joint = JobJoiner(cast("Any", jobs), 3)
        calls = [asyncio.create_task(joint.run(OptimStep(name))) for name in "ab"]
        await asyncio.sleep(0)
        assert jobs.seen == []
        joint.leave()
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert (first, type(second), jobs.seen) == ("a", ConfigError, [["a", "b"]])

    asyncio.run(asyncio.wait_for(live(), HANG_S))


def test_what_a_death_makes_fail_stays_queued_and_a_publication_keeps_its_model_from_being_saved(
    tmp_path: Path,
) -> None:
    async def live() -> None:
        world = World(tmp_path / "scheduler", "a", error=RESET)
        request = world.accept("a", STEP)
        world.scheduler.put(request)
        scheduler = asyncio.create_task(world.scheduler.run())
        asyncio.get_running_loop().call_later(0.01, world.futures.close)  # the death is known only then
        with pytest.raises(PeerLostError):
            await scheduler
        assert world.state(request) == "queued"

        world = World(tmp_path / "publication", "a", error=RESET)
        request = world.accept("a", SAVE_FOR_SAMPLER, sampling_session_seq_id=0, kind="inflight")
        await world.operations.execute(world.models["a"], request, world.fail)
        asyncio.get_running_loop().call_later(0.01, world.futures.close)
        await world.operations.close(HANG_S)
        assert world.state(request) == "queued"
        assert not world.models["a"].settled, "a saved state would count the request as answered"

    asyncio.run(asyncio.wait_for(live(), HANG_S))


def test_work_that_finds_no_free_ranks_or_fails_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def live() -> None:
        world = World(tmp_path, "ab")
        world.models["a"].session, world.models["a"].loaded = "ended", False
        async with world.scheduler.between_requests():
            monkeypatch.setattr(scheduler_module, "_WAIT_S", 0.0)
            await world.scheduler.remove_of({"ended"})
        assert set(world.scheduler.models) == {"a", "b"}, "the ranks were not free"
        monkeypatch.setattr(scheduler_module, "_WAIT_S", NEVER_S)

        async def use(ready: bool) -> None:
            async with world.scheduler.between_requests(lambda: ready):
                raise ConfigError("no.", part="x")

        failing, waiting = (asyncio.create_task(use(ready)) for ready in (True, False))
        scheduler, removal = map(asyncio.create_task, (world.scheduler.run(), world.scheduler.remove_of({"ended"})))
        await asyncio.wait([scheduler, removal], return_when=asyncio.FIRST_COMPLETED)
        assert set(world.scheduler.models) == {"b"}
        world.scheduler.close()
        await asyncio.wait([scheduler, failing, waiting])
        assert scheduler.exception() is None
        assert isinstance(failing.exception(), ConfigError)
        assert waiting.cancelled(), "its request stays in the store"

    asyncio.run(asyncio.wait_for(live(), HANG_S))


@pytest.mark.parametrize("error", [ConfigError("no.", part="x"), RESET])
def test_failures_that_no_death_follows_are_answered(
    error: WeightlaneError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the last may be what a death causes; the other doesn't wait to learn of one.
    monkeypatch.setattr(futures_module, "_DEATH_NOTICE_S", 0.01 if error is RESET else NEVER_S)

    async def live() -> None:
        world = World(tmp_path, "a", error=error)
        request = world.accept("a", STEP)
        world.scheduler.put(request)
        scheduler = asyncio.create_task(world.scheduler.run())
        answered = await asyncio.wait_for(world.futures.wait(request.id, "client a", HANG_S), HANG_S)
        scheduler.cancel()
        assert answered is not None
        assert answered.state == "failed"
        assert error.message in answered.answer.decode()

    asyncio.run(live())


def test_a_request_fails_whose_predecessor_does_not_arrive_and_so_does_the_predecessor_that_comes_late(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, "a")
    ahead, late = (world.futures.accept(STEP, "a", seq, "client a", b"{}")[0] for seq in (3, 2))
    world.scheduler.put(ahead)
    world.scheduler.give_up_gaps(NEVER_S)
    assert world.state(ahead) == "queued"
    world.scheduler.give_up_gaps(0.0)
    world.ask("a", STEP)
    assert world.run(2) == [named(STEP, "a")] * 2, "the failed one has its turn, as after a crash, and the next one"
    world.scheduler.put(late)
    for request, said in ((ahead, "request 1 of a has not arrived"), (late, "had been given up")):
        failed = world.store.request(request.id)
        assert failed is not None
        assert failed.state == "failed"
        assert said in failed.answer.decode()


def test_adapters_and_all_weights_are_not_taken_for_each_other(tmp_path: Path) -> None:
    adapters, all_weights = ServiceConfig(trains="adapters"), ServiceConfig(trains="all_weights")
    for name, lora, right, wrong in (("a", LORA, adapters, all_weights), ("b", None, all_weights, adapters)):
        store, directory = Store(tmp_path / name), tmp_path / "models"
        TrainingScheduler(store, ANY, ANY, ANY, ANY, ANY, directory, right).add(Model("m", "s", "c", lora, {}))
        assert TrainingScheduler(store, ANY, ANY, ANY, ANY, ANY, directory, right).resume() == 1
        with pytest.raises(ConfigError, match=r"files have models that are .* service\.trains"):
            TrainingScheduler(store, ANY, ANY, ANY, ANY, ANY, directory, wrong).resume()
        store.close()
        about = {"config": lora and lora.model_dump(mode="json")}
        found = Checkpoint("tinker://m/weights/a", "m", "training", tmp_path, 0.0, None, 0, about)
        with pytest.raises(ConfigError, match="which this service does not train"):
            Operations(ANY, ANY, ANY, ANY, ANY, ANY, wrong).check_kind(found)
