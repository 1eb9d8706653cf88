"""`OneRankEngine`: a rollout engine whose one rank is in the replica's own process, and makes updates on a thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from weightlane.ckpt_engines import ClosedError, CommitError, Deadline, QuarantinedError
from weightlane.ckpt_engines.runtime.threads import DaemonThreads

from ..config import RolloutConfig
from ..contract.engine import RolloutEngine, UpdateFigures
from ..contract.limits import limited, on_thread
from ..contract.loader import RankLoader
from ..contract.rank_group import RankGroup
from ..contract.requests import GenerationRequest, tokenizer_for_stop_strings
from .live_weights import LiveWeights
from .receiving_rank import ReceivingRank, not_connected
from .remote_failure import RemoteFailureError, quarantined, untouched

_CLOSE_S = 10.0
"""Most seconds that the rank may take to leave its publisher."""
_T = TypeVar("_T")


@dataclass
class RunningUpdate:
    """An update of the weights, seen from the thread that makes it."""

    serves: int
    """The version that serves once it has succeeded."""
    trusted: bool
    """Whether the weights are known to be one complete version."""
    deadline: Deadline
    given_up: threading.Event = field(default_factory=threading.Event)
    """Set once nobody waits for the update any more: it must not take effect then."""
    figures: UpdateFigures = field(default_factory=lambda: UpdateFigures(0, 0))
    """The costs; filled in by the engine."""

    def check(self, part: str) -> None:
        """Raise `CommitError` if nobody waits for the update any more."""
        if self.given_up.is_set():
            raise CommitError(f"version {self.serves} came too late.", part=part)


class OneRankEngine(RolloutEngine):
    """The parts of a rollout engine that have nothing to do with what generates: connections, updates, and the tokenizer.

    A subclass writes `start`, which ends with `follow`, `generate`, `abort`, and `close`, which begins with `leave`.
    """

    def __init__(self, name: str, config: RolloutConfig, model_dir: str | os.PathLike[str]) -> None:
        super().__init__(name, config, model_dir)
        self.updates = self._threads("update")
        """The thread on which the rank connects and makes updates, one after the other."""
        self.updating = RunningUpdate(0, trusted=True, deadline=Deadline.after(0))
        """The update that runs, or has run last."""
        self._rank: ReceivingRank | None = None
        self._tokenizer: Any = None

    @property
    def open(self) -> bool:
        """Whether the engine was started and not closed."""
        return self._rank is not None

    def follow(self, loader: RankLoader) -> None:
        """Let versions be written by `loader` from now on: the engine is `open`."""
        group = RankGroup(None)
        self._rank = ReceivingRank(0, 1, group, loader.device)
        self._rank.updatable = LiveWeights(loader, group)

    def running(self) -> ReceivingRank:
        """The rank. Raises `ClosedError` before `start` and after `close`, and `died` where the engine is `dead`."""
        if self._rank is None:
            raise ClosedError("the replica is not running.", part=self.name)
        if self.dead:
            raise self.died()
        return self._rank

    async def connect(self, fields: Mapping[str, Any]) -> None:
        """Subscribe the rank to the publisher in `fields`."""
        rank, limit_s = self.running(), self.config.connect_timeout_s
        async with limited(limit_s, not_connected(limit_s, self.name)):
            try:
                await self.in_thread(self.updates, self._connect, rank, fields)
            except RemoteFailureError as failure:
                raise failure.error from failure

    def _connect(self, rank: ReceivingRank, fields: Mapping[str, Any]) -> None:
        """Connect, on the thread. A rank that has left meanwhile, as the engine does when it is closed, is not subscribed."""
        if self._rank is rank:
            rank.connect(fields, lambda _: None)
        if self._rank is not rank:
            rank.leave()
            raise ClosedError("the replica is not running.", part=self.name)

    async def update(self, fields: Mapping[str, Any], *, serves: int, trusted: bool) -> UpdateFigures:
        """Make an update on the thread. One that takes too long is given up, and finds that out by `RunningUpdate.check`."""
        rank, limit_s = self.running(), self.config.commit_timeout_s
        update = RunningUpdate(serves, trusted, Deadline.after(limit_s))
        late = self.late("the weights were not replaced")
        try:
            async with limited(limit_s, quarantined(late, self.name, "The replica must not serve")):
                await self.in_thread(self.updates, self.make_update, rank, fields, update)
        except RemoteFailureError as failure:
            if failure.intact and trusted and not isinstance(failure.error, QuarantinedError):
                raise untouched(failure.error, self.name) from failure
            raise quarantined(failure.error, self.name, "The replica must not serve") from failure
        finally:
            update.given_up.set()
        return update.figures

    def make_update(self, rank: ReceivingRank, fields: Mapping[str, Any], update: RunningUpdate) -> None:
        """Make an update, on the thread. Raises as `ReceivingRank.update`."""
        self.updating = update
        rank.update(fields)

    async def tokenizer_for(self, request: GenerationRequest) -> Any:
        """The tokenizer of transformers, if `request` has stop strings, which need one. Raises `ConfigError` if there is none."""
        if request.sampling.stop_strings and self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(self._load_tokenizer)
        return self._tokenizer

    async def leave(self) -> None:
        """Give the running update up, and leave the publisher. The engine is not `open` any more."""
        rank, self._rank = self._rank, None
        self.updating.given_up.set()
        if rank is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(on_thread(rank.leave), _CLOSE_S)
        self.updates.shutdown(wait=False)  # what is queued finds that the engine is not open any more
        self.updates = self._threads("update")

    def _threads(self, purpose: str) -> DaemonThreads:
        """One thread. A closed engine has fresh ones, for the next `start`."""
        return DaemonThreads(1, f"weightlane-{purpose}-{self.name}")

    @staticmethod
    async def in_thread(threads: DaemonThreads, call: Callable[..., _T], *arguments: Any) -> _T:
        """The result of `call`, which runs on one of `threads`."""
        return await asyncio.get_running_loop().run_in_executor(threads, call, *arguments)

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer  # noqa: PLC0415 - only stop strings need one

        return tokenizer_for_stop_strings(partial(AutoTokenizer.from_pretrained, self.model_dir), self.name)
