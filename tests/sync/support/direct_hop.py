"""Trainer ranks and rollout ranks of one process, each with the slices of tensors that a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from hop import Replica, Rollout, Trainer
from patience import PATIENT
from slices import SPECS, Cut, Specs, values

from weightlane.ckpt_engines import SyncAbortedError
from weightlane.plugins import RunHooks
from weightlane.sync import CommitMode, Coordinator, Placement, Rendezvous, SyncConfig, SyncReport


class Hop:
    """Trainer ranks that hold what `cut` says, and replicas that need what is said of each; all in this process."""

    def __init__(
        self,
        stack: ExitStack,
        engine: str,
        options: dict[str, Any],
        cut: Cut,
        world: int,
        needs: Sequence[Placement | None],
        commit: CommitMode = "staged",
        specs: Specs = SPECS,
        rollout_specs: Specs | None = None,
        hooks: RunHooks | None = None,
        **more: Any,
    ) -> None:
        rendezvous = Rendezvous.host()
        given = (rendezvous.address, engine, options)
        self._specs = specs
        self.rollouts = [
            Rollout(f"rollout-{number}/0", *given, needed, rollout_specs or specs, commit, hooks)
            for number, needed in enumerate(needs)
        ]
        for rollout in self.rollouts:
            stack.enter_context(closing(rollout.end))
        more |= {"cut": cut, "specs": specs, "bucket_bytes": 8192, "hooks": hooks}
        self.trainers = [Trainer(f"trainer-{rank}", *given, rank, world, **more) for rank in range(world)]
        self.publishers = [stack.enter_context(closing(trainer.end)) for trainer in self.trainers]
        names = [publisher.name for publisher in self.publishers]
        replicas = [Replica(f"rollout-{number}", {one.name: one}) for number, one in enumerate(self.rollouts)]
        self.coordinator = Coordinator(rendezvous, names, replicas, SyncConfig(quorum=1.0, **PATIENT))
        stack.enter_context(closing(self.coordinator))

    def step(self, wanted: dict[str, torch.Tensor]) -> None:
        """Pass the fence, and train until the weights are `wanted`."""
        for trainer in self.trainers:
            trainer.train(wanted)

    def publish(self, version: int) -> None:
        for publisher in self.publishers:
            publisher.publish(version)

    def sync(self, version: int) -> SyncReport:
        return asyncio.run(self.coordinator.sync(version))

    def fails(self, version: int, says: str) -> BaseException | None:
        """Sync `version`, which is aborted with words that `says` matches; returns why."""
        with pytest.raises(SyncAbortedError, match=says) as caught:
            self.sync(version)
        return caught.value.__cause__

    def serve(self, version: int) -> SyncReport:
        """Train, publish and commit `version`: every replica has, bit for bit, what it needs of it."""
        self.step(values(version, self._specs))
        self.publish(version)
        report = self.sync(version)
        assert self.all_hold(version)
        return report

    def all_hold(self, wanted: int | Mapping[str, torch.Tensor]) -> bool:
        """Whether every replica has, bit for bit, what it needs of these weights, or of those of a version."""
        tensors = values(wanted, self._specs) if isinstance(wanted, int) else wanted
        return all(rollout.holds(tensors) for rollout in self.rollouts)


MakeHop = Callable[..., Hop]
"""The fixture `hop`: `hop(engine, *arguments)` has connected nobody yet; see `Hop`."""
