"""`Publications` of all weights: one version at a time, exactly the one that was asked for, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import HANG_S

from weightlane.ckpt_engines import DeadlineExceededError, StorageError, WorkerDiedError
from weightlane.trainer.service import publications as publications_module
from weightlane.trainer.service.publications import BASE, Publications


class World:
    """A runner, a syncer, and requests that note the version that is served at their beginning and at their end."""

    def __init__(self) -> None:
        part = cast("Any", self)
        self.publications = Publications(part, part, {}, None, 2, HANG_S)
        self.loading: dict[str, asyncio.Task[None]] = {}
        self.served: dict[str, list[tuple[int, int]]] = {}
        self.version, self.loads, self.failing = 0, 0, False

    async def run(self, _: Any) -> None:
        await asyncio.sleep(0)

    async def sync(self, version: int) -> None:
        """Serve the version that was published last."""
        await asyncio.sleep(0)
        if self.failing:
            raise StorageError("full.", part="x")
        self.version = version

    async def load(self, key: str) -> None:
        async def publish() -> None:
            self.loads += 1
            await self.publications.finish(key, await self.publications.begin(None, None))

        if key not in self.loading:
            self.loading[key] = task = asyncio.create_task(publish())
            task.add_done_callback(lambda _: self.loading.pop(key, None))
        await asyncio.shield(self.loading[key])
        await asyncio.sleep(0)

    async def request(self, key: str, turns: int = 3) -> None:
        async with self.publications.hold(key, lambda: self.load(key)) as named:
            assert named is None, "requests name no version of all weights"
            begun = self.version
            for _ in range(turns):
                await asyncio.sleep(0)
            self.served.setdefault(key, []).append((begun, self.version))


def live(running: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(running, HANG_S))


def test_requests_of_many_samplers_each_have_one_version_from_beginning_to_end() -> None:
    world = World()

    async def run() -> None:
        keys = [BASE, "first", "second", "third"]
        await asyncio.gather(*(world.request(keys[number % 4], number % 7) for number in range(200)))

    live(run())
    assert world.loads < 50, "requests that wait for the same weights share a publication"
    assert sum(len(each) for each in world.served.values()) == 200
    assert all(begun == ended for each in world.served.values() for begun, ended in each)
    of_keys = {key: {begun for begun, _ in each} for key, each in world.served.items()}
    assert not any(one & other for key, one in of_keys.items() for name, other in of_keys.items() if key != name)


def test_a_sampler_in_flight_moves_on_while_its_requests_run() -> None:
    world = World()

    async def run() -> None:
        async with world.publications.hold("moving", lambda: world.load("moving")):
            running = asyncio.create_task(world.request("moving", 50))
            await asyncio.sleep(0)
            await world.publications.finish("moving", await world.publications.begin(None, None))
        assert not running.done()
        await running

    live(run())
    assert world.served == {"moving": [(1, 2)]}


def test_a_publication_that_fails_fails_its_own_requests_and_others_go_on() -> None:
    world = World()

    async def run() -> None:
        world.failing = True
        with pytest.raises(StorageError):
            await world.request("first")
        world.failing = False
        given_up = asyncio.create_task(world.request("second"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        await asyncio.gather(world.request("first"), world.request(BASE))

    live(run())
    assert sorted(world.served) == [BASE, "first"]


def test_a_request_that_does_not_end_is_waited_for_until_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publications_module, "_DRAIN_S", 0.01)
    world = World()

    async def run() -> None:
        ending = asyncio.Event()

        async def endless() -> None:
            async with world.publications.hold(BASE, lambda: world.load(BASE)):
                await ending.wait()

        running = asyncio.create_task(endless())
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceededError, match="sampling requests with other weights did not end"):
            await world.request("first")
        ending.set()
        await running
        await world.request("first")

    live(run())
    assert list(world.served) == ["first"]


@pytest.mark.parametrize("error", [WorkerDiedError, StorageError])
def test_a_replica_that_has_just_died_is_not_told_of_an_adapter_and_any_other_error_fails_the_version(
    error: Any,
) -> None:
    told: list[int] = []

    async def announce(version: int, _: Any, __: Any) -> None:
        told.append(version)
        if len(told) == 1:
            raise error("gone.", part="rollout-0")

    world: Any = World()
    replicas: Any = {name: SimpleNamespace(announce=announce) for name in ("rollout-0", "rollout-1")}
    publications = Publications(world, world, replicas, lambda _: None, 2, HANG_S)
    publishing = publications.begin("a", cast("Any", object()))
    if error is WorkerDiedError:
        assert asyncio.run(publishing) == 1
    else:
        with pytest.raises(StorageError):
            asyncio.run(publishing)
    assert told == [1, 1]
