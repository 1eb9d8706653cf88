"""`Publications`: publishes weights to the replicas, and tracks their versions."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

from weightlane.ckpt_engines import DeadlineExceededError, WorkerDiedError

from ..config import LoraConfig
from ..loop.protocols import Rollout, Syncer
from ..runner.jobs import Publish
from ..runner.runner import Runner

_PART = "service publications"
_DRAIN_S = 600.0
"""Most seconds that a version of all weights waits for requests that use another one."""


BASE = ""
"""The key of the base model without any training."""


class Publications:
    """Publishes weights from the trainer ranks to all replicas, one version at a time, and tracks the version of each key.

    A key identifies published weights: a checkpoint's directory, the newest weights of a model, or `BASE`. Replicas keep versions
    of many adapters, but only one of all weights: a version of another key waits until no request uses the present one.

    The living `replicas` have the base model, and keep the adapters of `most` keys. The least recently used ones are dropped, and
    loaded again on use. `describe` converts an adapter's configuration to what replicas need to know; None if versions are all
    weights. A publication waits for the previous one up to `timeout_s`.
    """

    def __init__(
        self,
        runner: Runner,
        syncer: Syncer,
        replicas: Mapping[str, Rollout],
        describe: Callable[[LoraConfig], Any] | None,
        most: int,
        timeout_s: float,
    ) -> None:
        self._runner, self._syncer, self._replicas = runner, syncer, replicas
        self._describe, self._most, self._timeout_s = describe, most, timeout_s
        self._versions: OrderedDict[str, int] = OrderedDict({BASE: 0} if describe is None else {})
        """Versions by key, least recently used first."""
        self._held: Counter[tuple[str, int]] = Counter()
        """Number of requests that use each key's version, or are about to."""
        self._awaited: dict[str, list[asyncio.Future[int]]] = {}
        """Futures of requests that wait for the version of a key, and hold it as soon as it is loaded."""
        self._released = asyncio.Event()
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether a publication is in progress, for which another one would have to wait."""
        return self._turn.locked()

    @property
    def versions(self) -> dict[str, int]:
        """The version of each loaded key."""
        return dict(self._versions)

    async def begin(self, adapter: str | None, config: LoraConfig | None) -> int:
        """Publish an adapter of the trainer ranks, or all weights, as they are now, and return the version.

        `finish` must follow. Raises `DeadlineExceededError` if the previous publication is still in progress.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._turn.acquire()
        except TimeoutError as cause:
            raise DeadlineExceededError(
                f"the version before was not in service after {self._timeout_s:.0f} s.", part=_PART
            ) from cause
        try:
            version = next(self._numbers)
            if self._describe is not None and config is not None:
                while len(self._versions) >= self._most:
                    self._versions.popitem(last=False)
                described = self._describe(config)
                keep = sorted({*self._versions.values(), *(held for _, held in self._held)})
                await self._announce(version, described, keep)
            await self._runner.run(Publish(version, adapter))
        except BaseException:
            self._turn.release()
            raise
        return version

    async def _announce(self, version: int, described: Any, keep: Collection[int]) -> None:
        """Tell every replica which adapter a version will be. One that has just died gets no version: others may be left."""
        calls = [each.announce(version, described, keep) for each in self._replicas.values()]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerDiedError):
                raise answer

    async def finish(self, key: str, version: int) -> None:
        """Wait until the replicas have a version, and make it that of `key`.

        Raises `DeadlineExceededError` if requests that use other weights did not end.
        """
        try:
            if self._describe is None:
                await self._without_others(key)
            await self._syncer.sync(version)
            self._versions[key] = version
            self._versions.move_to_end(key)
            for waiting in self._awaited.pop(key, []):
                if not waiting.done():
                    self._held[key, version] += 1
                    waiting.set_result(version)
        finally:
            self._turn.release()

    @asynccontextmanager
    async def hold(self, key: str, load: Callable[[], Awaitable[None]]) -> AsyncIterator[int | None]:
        """Keep the weights of `key` on the replicas inside the block.

        Yields the name of the weights in requests: the version of an adapter, 0 for the base model, or None if versions are all
        weights. If replicas don't have them, `load` begins and finishes a publication of `key`, or waits for one. It is called
        again if that publication ended before this request began to wait.
        """
        if self._describe is not None and key == BASE:
            yield 0
            return
        version = await self._taken(key, load)
        try:
            yield None if self._describe is None else version
        finally:
            self._release(key, version)

    async def _taken(self, key: str, load: Callable[[], Awaitable[None]]) -> int:
        """Hold the version of `key` for this request, and return it."""
        if key in self._versions:
            self._versions.move_to_end(key)
            self._held[key, self._versions[key]] += 1
            return self._versions[key]
        arriving: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(key, []).append(arriving)
        try:
            while not arriving.done():
                await load()
        except BaseException:
            if arriving.done():
                self._release(key, arriving.result())
            arriving.cancel()
            raise
        return arriving.result()

    def _release(self, key: str, version: int) -> None:
        self._held[key, version] -= 1
        if not self._held[key, version]:
            del self._held[key, version]
        self._released.set()

    async def _without_others(self, key: str) -> None:
        """Make further requests for other keys wait, and wait for the end of those that run."""
        for other in [each for each in self._versions if each != key]:
            del self._versions[other]
        try:
            async with asyncio.timeout(_DRAIN_S):
                while any(held != key for held, _ in self._held):
                    self._released.clear()
                    await self._released.wait()
        except TimeoutError as cause:
            raise DeadlineExceededError(
                f"sampling requests with other weights did not end within {_DRAIN_S:.0f} s.",
                part=_PART,
                hint="Replicas have one version of all weights at a time: sample from the newest, or ask for fewer tokens.",
            ) from cause
