"""`Serving`: one replica of the engine under test, with its event loop, and a trainer that publishes to it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.sync import Outcome, Replica, ReplicaState, SyncReport

from ..config import RolloutConfig
from ..contract.engine import RolloutEngine
from ..contract.records import Completion
from .models import PROMPT
from .publishing import GatedReplica, OneRankTrainer

_Result = TypeVar("_Result")
REPLICA = "rollout-0"
CLOSING_S = 60.0
"""Most seconds that `Serving.close` waits for a replica, which limits the steps of its end itself."""


class Serving:
    """A replica that was made from a checkpoint, and is started by `start`.

    Args:
        engine: Class of the engine.
        config: Options of the replica.
        model_dir: Checkpoint directory that it starts from, as version 0.
        deadline_s: Seconds within which a call must end.
    """

    def __init__(self, engine: type[RolloutEngine], config: RolloutConfig, model_dir: Path, deadline_s: float) -> None:
        self.replica = GatedReplica(REPLICA, config, model_dir, engine=engine)
        self.model_dir = model_dir
        self.trainer: OneRankTrainer | None = None
        self._deadline_s = deadline_s
        self._runner = asyncio.Runner()
        self._closed = False
        self._takes_seeds: bool | None = None
        """Whether the replica draws by seeds; None before it was asked."""

    @property
    def healthy(self) -> bool:
        """Whether a next check may use it: it serves, is idle, and its trainer has not lost it."""
        state = None if self.trainer is None else self.trainer.states.get(REPLICA)
        stats = self.replica.stats()
        return stats.serving and not stats.in_flight and state in (ReplicaState.JOINING, ReplicaState.SERVING)

    def run(self, call: Coroutine[Any, Any, _Result], what: str) -> _Result:
        """Run a coroutine, which `what` names, to its end. Fails the check if that takes longer than the deadline."""

        async def bounded() -> _Result:
            limit = asyncio.timeout(self._deadline_s)
            try:
                async with limit:
                    return await call
            except TimeoutError:
                assert not limit.expired(), f"expected {what} to end within {self._deadline_s:g} s"
                raise

        return self._runner.run(bounded())

    def start(self) -> None:
        """Start the replica."""
        environment = dict(os.environ)
        try:
            self.run(self.replica.start(), "start")
        finally:  # an engine may set variables for its own processes
            os.environ.clear()
            os.environ.update(environment)

    async def connect(
        self,
        tensors: Mapping[str, torch.Tensor],
        backend: str,
        options: Mapping[str, Any],
        more: Callable[[OneRankTrainer], Sequence[Replica]] = lambda _: (),
    ) -> None:
        """Put a new trainer of `tensors` in the place of the one before, and connect it to the replica and to `more` others.

        A version counts only if all of them commit it.
        """
        before = self.trainer
        self.trainer = OneRankTrainer(tensors, backend, options, self.replica.version)
        try:
            await self.replica.connect(self.trainer.address, backend, options)
            await self.trainer.connect([self.replica, *more(self.trainer)], self._deadline_s)
        finally:
            if before is not None:
                await asyncio.to_thread(before.close)

    async def sync(self, tensors: Mapping[str, torch.Tensor]) -> SyncReport:
        """Publish `tensors` as the next version, and expect the replica to commit it."""
        assert self.trainer is not None, "connected"
        report = await self.trainer.sync(tensors)
        mine = report.replicas[REPLICA]
        assert mine.outcome is Outcome.COMMITTED, (
            f"expected version {report.version} to be committed, it is {mine.outcome}: {mine.error}"
        )
        return report

    def serve(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Make the replica serve `tensors`; returns their version."""
        self.run(self.sync(tensors), "the sync of a version")
        assert self.trainer is not None, "connected"
        return self.trainer.version

    def generate(self, prompt: Sequence[int] = PROMPT, count: int = 16, **options: Any) -> Completion:
        """Generate one completion."""
        return self.run(self.replica.generate("one", prompt, count, **options), "a completion")

    def greedy(self, prompt: Sequence[int] = PROMPT, count: int = 16) -> Completion:
        """Decode one completion greedily."""
        return self.generate(prompt, count, greedy=True)

    @property
    def takes_seeds(self) -> bool:
        """Whether the replica takes requests with a seed, and so repeats a completion bit for bit. It may refuse them."""
        if self._takes_seeds is None:
            try:
                self.generate(count=1, seed=0)
            except ConfigError:
                self._takes_seeds = False
            else:
                self._takes_seeds = True
        return self._takes_seeds

    def seed(self, number: int) -> int | None:
        """`number` as the seed of a request, or None if the replica refuses seeds."""
        return number if self.takes_seeds else None

    async def tokens(self, count: int, busy: Sequence[asyncio.Task[Any]]) -> None:
        """Wait until `count` more tokens have been generated, or all of `busy` have ended."""
        wanted = self.replica.clock.tokens + count
        while self.replica.clock.tokens < wanted and not all(task.done() for task in busy):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)

    def close(self) -> None:
        """Close the trainer, the replica and the event loop. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._runner.run(asyncio.wait_for(self.replica.close(), CLOSING_S))
        finally:
            if self.trainer is not None:
                self.trainer.close()
            self._runner.close()
