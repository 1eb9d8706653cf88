"""`Publications`: which adapters the replicas have, and under which versions."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from weightlane.ckpt_engines import ConfigError, DeadlineExceededError, WeightlaneError
from weightlane.sync import SyncReport

from ..config import LoraConfig
from ..runner.jobs import Publish
from ..runner.runner import Runner

_PART = "service publications"


class AdapterReplica(Protocol):
    """A rollout replica that holds many adapters."""

    @property
    def name(self) -> str:
        """The replica's name."""

    async def announce(self, version: int, adapter: Any, keep: Collection[int] = ()) -> None:
        """Say what a version will be, and which ones stay loaded."""

    async def generate(self, request_id: str, prompt_ids: Sequence[int], max_new_tokens: int, **options: Any) -> Any:
        """Generate a completion."""

    async def watch(self) -> NoReturn:
        """Raise `WorkerDiedError` when its process dies."""


class Syncer(Protocol):
    """Carries versions to the replicas."""

    async def sync(self, version: int) -> SyncReport:
        """Put a published version into service."""

    def participant_lost(self, error: WeightlaneError, replica: str = "") -> None:
        """Tell the syncer that a replica has died."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A version that the trainer ranks have published, and that is on its way to the replicas."""

    version: int
    key: str


class Publications:
    """Brings adapters from the trainer ranks to all replicas, one at a time, and knows the version of each.

    A key stands for what is published: a checkpoint's path, a sampler's id, or a model whose newest weights are meant.

    Args:
        runner: Runs jobs on the trainer ranks.
        syncer: Carries versions.
        replicas: Where they go.
        describe: Makes of an adapter's configuration what replicas are told.
        most: Most keys whose versions replicas keep; those that were used longest ago go, and come back when they are used.
        timeout_s: Most seconds that a publication waits for the one before.
    """

    def __init__(
        self,
        runner: Runner,
        syncer: Syncer,
        replicas: Sequence[AdapterReplica],
        describe: Callable[[LoraConfig], Any],
        most: int,
        timeout_s: float,
    ) -> None:
        self._runner, self._syncer = runner, syncer
        self._replicas = {replica.name: replica for replica in replicas}
        self._describe, self._most, self._timeout_s = describe, most, timeout_s
        self._versions: OrderedDict[str, int] = OrderedDict()
        """Versions by key; those that were used longest ago come first."""
        self._held: Counter[int] = Counter()
        """Requests that compute with each version, or are about to."""
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether a version is on its way, for whose end another one would wait."""
        return self._turn.locked()

    @property
    def versions(self) -> dict[str, int]:
        """The version of each key that is loaded."""
        return dict(self._versions)

    def version_of(self, key: str) -> int | None:
        """The version under which replicas have `key`; None if they don't have it."""
        if key in self._versions:
            self._versions.move_to_end(key)
        return self._versions.get(key)

    async def begin(self, key: str, adapter: str, config: LoraConfig) -> Begun:
        """Publish an adapter of the trainer ranks, as it is now; `finish` must follow.

        Raises:
            DeadlineExceededError: The publication before is still under way.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._turn.acquire()
        except TimeoutError as cause:
            raise DeadlineExceededError(
                f"the version before was not in service after {self._timeout_s:.0f} s.", part=_PART
            ) from cause
        try:
            while len(self._versions) >= self._most:
                self._versions.popitem(last=False)
            version, described = next(self._numbers), self._describe(config)
            keep = sorted({*self._versions.values(), *self._held})
            await asyncio.gather(*(each.announce(version, described, keep) for each in self._replicas.values()))
            await self._runner.run(Publish(version, adapter))
        except BaseException:
            self._turn.release()
            raise
        return Begun(version, key)

    async def finish(self, begun: Begun) -> SyncReport:
        """Wait until the replicas have a version; from then on it is that of its key."""
        try:
            report = await self._syncer.sync(begun.version)
            self._versions[begun.key] = begun.version
            self._versions.move_to_end(begun.key)
            return report
        finally:
            self._turn.release()

    def lost(self, replica: str, error: WeightlaneError) -> None:
        """Go on without a replica that died."""
        self._replicas.pop(replica, None)
        self._syncer.participant_lost(error, replica)

    @contextmanager
    def hold(self, key: str) -> Iterator[int]:
        """The version of `key`, which replicas keep inside the block. Raises `ConfigError` if they don't have it."""
        version = self.version_of(key)
        if version is None:
            raise ConfigError(
                f"the replicas don't have {key}.", part=_PART, hint="Save the weights for sampling first."
            )
        self._held[version] += 1
        try:
            yield version
        finally:
            self._held[version] -= 1
            if not self._held[version]:
                del self._held[version]
