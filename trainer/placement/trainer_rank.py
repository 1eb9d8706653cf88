"""`TrainerRank`: one trainer process: its training engine and its publisher."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import CheckpointEngineRegistry, GradientError, ProtocolError
from weightlane.ckpt_engines.engines.torch_distributed.tcp_store import reserve_port
from weightlane.plugins import process_hooks
from weightlane.sync import CheckpointEngineConfig, Placement, Publisher, SyncConfig, dtype_of
from weightlane.sync.publisher import publisher_name

from ..config import TrainerConfig
from ..data.batch import MiniBatch, TokenBatch
from ..engines.contract import TrainingEngine
from ..engines.registry import training_engine_class
from ..loop.protocols import StepReport
from ..objectives.loss import Loss


class TrainerRank:
    """Everything one trainer process does. Called from one thread; knows no Ray.

    Args:
        config: The run's trainer section.
        loss: The objective.
        rank: This process, from 0.
        world: Number of trainer ranks.
    """

    def __init__(self, config: TrainerConfig, loss: Loss, rank: int, world: int) -> None:
        self._config = config
        self._rank, self._world = rank, world
        self._loss = loss
        self._engine: TrainingEngine | None = None
        self._publisher: Publisher | None = None
        self._reserved: socket.socket | None = None

    def free_address(self, host: str) -> tuple[str, int]:
        """Reserve a port on `host` for the ranks' own process group, until `setup` of this rank listens there."""
        self._reserved = reserve_port(host)
        return host, int(self._reserved.getsockname()[1])

    def setup(self, rendezvous: tuple[str, int], model_dir: Path, seed: int, state: Path | None = None) -> int:
        """Load the model, and the training state in `state` if there is one. Collective. Returns the steps taken."""
        if self._config.niceness:
            os.nice(self._config.niceness)
        engine_class = training_engine_class(self._config.engine)
        self._engine = engine_class(self._config, self._rank, self._world, rendezvous)
        try:
            self._engine.setup(model_dir, seed)
        finally:
            if self._reserved is not None:
                self._reserved.close()
        if state is not None:
            self._engine.load(state)
        return self._engine.step

    def placement(self, wire_dtype: str) -> Placement:
        """Which slices of which checkpoint tensors this rank holds."""
        return Placement.of_shards(self._open().local_shards(dtype_of(wire_dtype)))

    def connect(
        self,
        rendezvous: Mapping[str, Any],
        transport: CheckpointEngineConfig,
        sync: SyncConfig,
        wire_dtype: str,
        placements: Sequence[Placement],
    ) -> None:
        """Make this rank's publisher, which joins the run's rendezvous and leaves an earlier one.

        `placements` is what `placement` of every rank gave, in rank order.
        """
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = Publisher(
            publisher_name(self._rank),
            rendezvous,
            rank=self._rank,
            placements=placements,
            shards=self._open().local_shards(dtype_of(wire_dtype)),
            engine=CheckpointEngineRegistry().create(transport.backend, transport.options),
            bucket_bytes=sync.bucket_bytes,
            deadline_s=sync.deadline_s,
            integrity=sync.integrity,
            quantise=sync.quantise,
            codec=sync.codec,
            full_every=sync.full_every,
            network=sync.network,
        )

    def publish(self, version: int) -> float:
        """Publish the parameters as `version`; returns the seconds this call took."""
        started = time.perf_counter()
        if self._publisher is None:
            raise ProtocolError("publish was called before connect.", part=publisher_name(self._rank))
        self._publisher.publish(version)
        return time.perf_counter() - started

    def train_step(self, batch: TokenBatch, mini_batch: MiniBatch | None = None) -> StepReport:
        """Forward, backward, fence, optimizer step. Collective. A gradient that is not finite changes nothing."""
        started = time.perf_counter()
        engine, fence_at, fence_s = self._open(), 0.0, 0.0

        def before_change(names: Collection[str]) -> None:
            nonlocal fence_at, fence_s
            fence_at = fence_at or time.perf_counter()
            if self._publisher is not None:
                fence_s += self._publisher.fence(names)

        metrics = engine.forward_backward(batch, self._loss, mini_batch).metrics
        try:
            grad_norm = engine.optim_step(before_change)
        except GradientError as error:  # on every rank
            return StepReport(engine.step, metrics, skipped=str(error), seconds=time.perf_counter() - started)
        seconds = time.perf_counter() - started
        facts = {
            "participant": publisher_name(self._rank),
            "seconds": seconds,
            "forward_backward_s": fence_at - started,
            "fence_s": fence_s,
            "optimizer_s": seconds - (fence_at - started) - fence_s,
        }
        process_hooks().rank_stepped(rank=self._rank, step=engine.step, facts=facts)
        return StepReport(engine.step, metrics, grad_norm, fence_s, seconds)

    def save(self, directory: Path) -> None:
        """Save the full training state. Collective."""
        self._open().save(directory)

    def export_hf(self, directory: Path, dtype: str) -> None:
        """Write a Hugging Face model directory. Collective."""
        self._open().export_hf(directory, dtype_of(dtype))

    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def close(self) -> None:
        """Leave the run. Never raises."""
        if self._publisher is not None:
            self._publisher.close()
        if self._engine is not None:
            self._engine.close()

    def _open(self) -> TrainingEngine:
        if self._engine is None:
            raise ProtocolError("the trainer rank was used before setup.", part=publisher_name(self._rank))
        return self._engine
