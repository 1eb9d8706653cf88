"""Requests that fail because a process has died run again after the next start; other failures are answered."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import HANG_S

from weightlane.ckpt_engines import ConfigError, PeerLostError, StorageError, WeightlaneError
from weightlane.trainer.config import LoraConfig
from weightlane.trainer.service.records import futures as futures_module
from weightlane.trainer.service.records.futures import Futures
from weightlane.trainer.service.records.models import Model
from weightlane.trainer.service.records.store import Store, StoredRequest
from weightlane.trainer.service.training.operations import SAVE_FOR_SAMPLER, STEP, Operations
from weightlane.trainer.service.training.training_lane import TrainingLane
from weightlane.trainer.service.wire.bodies import WireLimits

RESET = PeerLostError("the connection was reset.", part="gloo")
LORA = LoraConfig(rank=2, publish="adapter")


class World:
    """A store, a lane whose requests all fail by `error`, and a publication that does."""

    def __init__(self, directory: Path, error: WeightlaneError) -> None:
        self.store, self.error = Store(directory / "store.sqlite"), error
        self.futures = Futures(self.store)
        self.lane = TrainingLane(
            self.store,
            self.futures,
            cast("Any", None),
            cast("Any", None),
            self.fail,
            lambda _: True,
            lambda _: None,
            directory / "models",
            save_every=1,
            max_queued=8,
            max_loaded=8,
            join_wait_s=0.0,
            trains_weights=False,
        )
        publications = SimpleNamespace(begin=self.begin, finish=self.fail, busy=False)
        limits = WireLimits()
        any_part = cast("Any", None)
        parts = any_part, any_part, any_part, cast("Any", publications), any_part
        self.operations = Operations(self.futures, *parts, limits, 60.0, trains_weights=False)
        self.operations.samplers = cast("Any", SimpleNamespace(create=lambda *_, **__: None))
        self.operations.lane = self.lane
        self.model = Model("s:train:0", "s", "client", LORA, {}, next_seq=1, loaded=True)
        self.lane.add(self.model)

    async def begin(self, *_: Any) -> None:
        return None

    async def fail(self, *_: Any) -> None:
        raise self.error

    def accept(self, operation: str, **asked: Any) -> StoredRequest:
        payload = json.dumps({"model_id": self.model.id, "seq_id": 1, **asked}).encode()
        return self.futures.accept(operation, self.model.id, 1, "client", payload)[0]

    def state(self, request: StoredRequest) -> str:
        found = self.store.request(request.id)
        assert found is not None
        return found.state


def test_what_a_death_makes_fail_in_the_lane_stays_queued(tmp_path: Path) -> None:
    async def live() -> None:
        world = World(tmp_path, RESET)
        request = world.accept(STEP)
        world.lane.put(request)
        lane = asyncio.create_task(world.lane.run())
        asyncio.get_running_loop().call_later(0.01, world.futures.close)  # the death is known only then
        with pytest.raises(PeerLostError):
            await asyncio.wait_for(lane, HANG_S)
        assert world.state(request) == "queued"

    asyncio.run(live())


def test_a_publication_that_a_death_aborts_stays_queued_and_keeps_its_model_from_being_saved(tmp_path: Path) -> None:
    async def live() -> None:
        world = World(tmp_path, RESET)
        request = world.accept(SAVE_FOR_SAMPLER, sampling_session_seq_id=0, kind="inflight")
        await world.operations.execute(world.model, request, world.fail)
        asyncio.get_running_loop().call_later(0.01, world.futures.close)
        await asyncio.wait_for(world.operations.close(HANG_S), HANG_S)
        assert world.state(request) == "queued"
        assert not world.model.settled, "a saved state would count the request as answered"

    asyncio.run(live())


@pytest.mark.parametrize("error", [ConfigError("no.", part="x"), StorageError("full.", part="x"), RESET])
def test_failures_that_no_death_follows_are_answered(
    error: WeightlaneError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of these, the last alone may be what a death causes; the others don't wait to learn of one.
    monkeypatch.setattr(futures_module, "_DEATH_NOTICE_S", 0.01 if error is RESET else 10 * HANG_S)

    async def live() -> None:
        world = World(tmp_path, error)
        request = world.accept(STEP)
        world.lane.put(request)
        lane = asyncio.create_task(world.lane.run())
        answered = await asyncio.wait_for(world.futures.wait(request.id, "client", HANG_S), HANG_S)
        lane.cancel()
        assert answered is not None
        assert answered.state == "failed"
        assert error.message in answered.answer.decode()

    asyncio.run(live())
