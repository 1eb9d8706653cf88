"""`RankWorker`: one trainer process, with the training engines of its roles and their publishers."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import CheckpointEngineRegistry, GradientError, ProtocolError, WeightlaneError
from weightlane.ckpt_engines.engines.torch_distributed.process_group import reserve_port
from weightlane.ckpt_engines.runtime.process_memory import MemoryUse, memory_use
from weightlane.plugins import process_hooks
from weightlane.sync import CheckpointEngineConfig, Placement, Publisher, SyncConfig, dtype_of
from weightlane.sync.publisher import publisher_name

from ..config import LoraConfig
from ..data.batch import LossDenominators, TokenBatch
from ..data.step_result import StepResult
from ..engines.contract import BackwardResult, ForwardBackward, OptimStep, StatePart, TrainingEngine, with_adapters
from ..engines.lora.sites import DEFAULT
from ..engines.optimizers.settings import AdamParams
from ..engines.registry import training_engine_class
from ..objectives.loss import LOGPROBS, Loss, OutputName
from .rank_outputs import RankOutputs
from .residency import Moves
from .role_spec import POLICY_GROUP, RoleSpec, rank_name


@dataclass(slots=True)
class OpenMiniBatch:
    """A mini-batch whose optimizer step has not been taken yet."""

    computed_s: float = 0.0
    """Seconds of forward and backward passes."""
    failed: str = ""
    """Why a part of it has no gradient; empty if none failed."""


@dataclass(slots=True)
class HostedRole:
    """A role on this rank."""

    engine: TrainingEngine
    losses: Mapping[str, Loss]
    publisher: Publisher | None = None
    fence_s: float = 0.0
    """Seconds that moves to host memory waited for the publisher since the last optimizer step."""
    own: str = ""
    """The adapter of calls that name none; empty for the model's own weights."""
    mini_batches: dict[str, OpenMiniBatch] = field(default_factory=dict)
    """Unfinished mini-batches by adapter; "" is the model's own weights."""

    def adapter(self, name: str | None) -> str:
        """The adapter that a call's argument `name` stands for: `own` if it is None."""
        return self.own if name is None else name

    def steps_of(self, adapter: str | None) -> int:
        """Optimizer steps of the adapter, or of the model if its engine has no adapters."""
        return (
            with_adapters(self.engine, "steps_of").steps_of(adapter) if self.engine.has_adapters else self.engine.step
        )

    def fence(self, names: Collection[str] | None = None) -> float:
        """Wait until the publisher no longer reads the checkpoint tensors `names`, or any if None. Returns the seconds waited."""
        return 0.0 if self.publisher is None else self.publisher.fence(names)


class RankWorker:
    """The methods of one trainer process, rank `rank` of `world` in `group`. Called from one thread; independent of Ray."""

    def __init__(self, rank: int, world: int, group: str = POLICY_GROUP) -> None:
        self._rank, self._world = rank, world
        self._name = rank_name(group, rank)
        self._roles: dict[str, HostedRole] = {}
        self._reserved: socket.socket | None = None

    def free_address(self, host: str) -> tuple[str, int]:
        """Reserve a port on `host` for the ranks' own process group, until `setup` of this rank listens there."""
        self._reserved = reserve_port(host)
        return host, int(self._reserved.getsockname()[1])

    def setup(self, spec: RoleSpec, rendezvous: tuple[str, int]) -> int:
        """Load a role's model, and the training state in ``spec.state``, if there is one. Collective. Returns the steps taken.

        Roles after the first one use the ranks' process group that the first one created.
        """
        if spec.config.niceness and not self._roles:
            os.nice(spec.config.niceness)
        engine = training_engine_class(spec.config.engine)(spec.config, self._rank, self._world, rendezvous)
        self._roles[spec.name] = HostedRole(engine, spec.losses, own=DEFAULT if spec.config.lora is not None else "")
        try:
            engine.setup(spec.model_dir, spec.seed)
        finally:
            if self._reserved is not None:
                self._reserved.close()
        if spec.state is not None:
            engine.load(spec.state)
        return engine.step

    def call(self, role: str, moves: Moves, method: str, *args: Any) -> Any:
        """Move parts of the roles' states, then call a method of this class for `role`."""
        for name, parts in moves.away.items():
            self._offload(self._hosted(name), parts)
        for name, here in moves.here.items():
            self._hosted(name).engine.onload(here)
        return getattr(self, method)(role, *args)

    def rest(self, role: str) -> None:
        """Do nothing: only the moves of `call` are wanted."""

    def placement(self, role: str, wire_dtype: str) -> Placement:
        """Which slices of which checkpoint tensors this rank holds."""
        return Placement.of_shards(self._engine(role).local_shards(dtype_of(wire_dtype)))

    def connect(
        self,
        role: str,
        rendezvous: Mapping[str, Any],
        transport: CheckpointEngineConfig,
        sync: SyncConfig,
        wire_dtype: str,
        placements: Sequence[Placement],
    ) -> None:
        """Create this rank's publisher of `role`, which joins the run's rendezvous. An earlier publisher is closed.

        `placements` are the results of `placement` on every rank, in rank order.
        """
        hosted = self._hosted(role)
        if hosted.publisher is not None:
            hosted.publisher.close()
        hosted.publisher = Publisher(
            publisher_name(self._rank),
            rendezvous,
            rank=self._rank,
            placements=placements,
            shards=hosted.engine.local_shards(dtype_of(wire_dtype)),
            engine=CheckpointEngineRegistry().create(transport.backend, transport.options),
            config=sync,
        )

    def publish(self, role: str, version: int, adapter: str | None = None) -> float:
        """See `Role.publish`. Returns the seconds this call took. An adapter is copied once the version before has been read."""
        started = time.perf_counter()
        hosted = self._hosted(role)
        if hosted.publisher is None:
            raise ProtocolError("publish was called before connect.", part=self._name)

        def before_change(names: Collection[str]) -> None:
            hosted.fence(names)

        if adapter is not None:
            with_adapters(hosted.engine, adapter).load_published(before_change, adapter)
        hosted.publisher.publish(version)
        return time.perf_counter() - started

    def forward(
        self,
        role: str,
        batch: TokenBatch,
        outputs: Collection[OutputName] = LOGPROBS,
        top_k: int = 0,
        adapter: str | None = None,
    ) -> RankOutputs:
        """Outputs of this rank's share of `batch`, without gradient. Collective."""
        started = time.perf_counter()
        found = RankOutputs.of(self._engine(role).forward(batch, outputs, top_k, adapter))
        facts = {"role": role, "seconds": time.perf_counter() - started, "participant": self._name}
        process_hooks().outputs_computed(rank=self._rank, facts=facts)
        return found

    def forward_backward(
        self,
        role: str,
        batch: TokenBatch,
        loss: str | Loss,
        denominators: LossDenominators | None = None,
        outputs: Collection[OutputName] = (),
        adapter: str | None = None,
    ) -> tuple[Mapping[str, float], RankOutputs]:
        """See `Role.forward_backward`. Returns metrics, and outputs of this rank's share. Collective."""
        started, hosted = time.perf_counter(), self._hosted(role)
        mini_batch = hosted.mini_batches.setdefault(hosted.adapter(adapter), OpenMiniBatch())
        if mini_batch.failed:
            raise self._incomplete(mini_batch)
        try:
            chosen = self._loss(role, loss)
            result = hosted.engine.forward_backward(batch, chosen, denominators, outputs, adapter)
        except Exception as error:
            mini_batch.failed = _why(error)  # until the step, since other parts of the mini-batch may be queued already
            raise
        mini_batch.computed_s += time.perf_counter() - started
        return result.metrics, RankOutputs.of(result.outputs)

    def optim_step(self, role: str, adapter: str | None = None, params: AdamParams | None = None) -> StepResult:
        """Wait for the fence, then take the optimizer step. Collective. A gradient that is not finite changes nothing."""
        started, hosted = time.perf_counter(), self._hosted(role)
        fence_s, hosted.fence_s = hosted.fence_s, 0.0
        mini_batch = hosted.mini_batches.pop(name := hosted.adapter(adapter), OpenMiniBatch())
        if mini_batch.failed:
            hosted.engine.zero_grad(name)
            raise self._incomplete(mini_batch)

        def before_change(names: Collection[str]) -> None:
            nonlocal fence_s
            fence_s += hosted.fence(names)

        try:
            grad_norm = hosted.engine.optim_step(before_change, adapter, params)
        except GradientError as error:  # on every rank
            seconds = mini_batch.computed_s + time.perf_counter() - started
            return StepResult(hosted.steps_of(adapter), seconds=seconds, skipped=str(error))
        stepped_s, step = time.perf_counter() - started, hosted.steps_of(adapter)
        facts = {
            "role": role,
            "participant": self._name,
            "seconds": mini_batch.computed_s + stepped_s,
            "forward_backward_s": mini_batch.computed_s,
            "fence_s": fence_s,
            "optimizer_s": max(0.0, stepped_s - fence_s),
        }
        process_hooks().rank_stepped(rank=self._rank, step=step, facts=facts)
        seconds = mini_batch.computed_s + stepped_s
        return StepResult(step, grad_norm=grad_norm, fence_s=fence_s, seconds=seconds)

    def together(self, role: str, calls: Sequence[ForwardBackward | OptimStep]) -> list[Any]:
        """See `Role.together`. Returns the result or the error of each call. Collective."""
        computed = iter(self._pass_together(role, [call for call in calls if isinstance(call, ForwardBackward)]))
        found: list[Any] = []
        for call in calls:
            try:
                if isinstance(call, OptimStep):
                    found.append(self.optim_step(role, call.adapter, call.params))
                else:
                    found.append(next(computed))
            except WeightlaneError as error:
                found.append(error)
        return found

    def _pass_together(self, role: str, calls: Sequence[ForwardBackward]) -> list[Any]:
        """Carry out the passes of `together`. As in `forward_backward`, a failed call fails its adapter's mini-batch."""
        if not calls:
            return []
        started, hosted = time.perf_counter(), self._hosted(role)
        batches = [hosted.mini_batches.setdefault(hosted.adapter(call.adapter), OpenMiniBatch()) for call in calls]
        whole = [call for call, each in zip(calls, batches, strict=True) if not each.failed]
        try:
            engine = with_adapters(hosted.engine, "a joint job")
            computed = iter(engine.forward_backward_together(whole))
        except Exception as error:
            for each in batches:
                each.failed = each.failed or _why(error)
            raise
        found: list[Any] = []
        for each in batches:
            answer = self._incomplete(each) if each.failed else next(computed)
            if isinstance(answer, BackwardResult):
                each.computed_s += (time.perf_counter() - started) / len(whole)
                found.append((answer.metrics, RankOutputs.of(answer.outputs)))
            else:
                each.failed = each.failed or str(answer)
                found.append(answer)
        return found

    def add_adapter(
        self, role: str, name: str, config: LoraConfig, source: Path | None = None, optimizer: bool = True
    ) -> int:
        """See `Role.add_adapter`. Collective."""
        hosted = self._hosted(role)
        engine = with_adapters(hosted.engine, name)
        engine.add_adapter(name, config, source, replace=True, resume=optimizer)
        hosted.mini_batches.pop(name, None)
        return engine.steps_of(name)

    def drop_gradient(self, role: str, adapter: str | None = None) -> None:
        """Drop the gradients of a mini-batch, and the record of its failure."""
        hosted = self._hosted(role)
        hosted.mini_batches.pop(name := hosted.adapter(adapter), None)
        hosted.engine.zero_grad(name)

    def fail_mini_batch(self, role: str, reason: str, adapter: str | None = None) -> None:
        """Record that a part of a mini-batch has no gradient, because of `reason`."""
        hosted = self._hosted(role)
        hosted.mini_batches.setdefault(hosted.adapter(adapter), OpenMiniBatch()).failed = reason

    def wait_stored(self, role: str, version: int, timeout_s: float) -> None:
        """See `Role.wait_stored`."""
        hosted = self._hosted(role)
        assert hosted.publisher is not None, "it has published the version"
        hosted.publisher.wait_stored(version, timeout_s)

    def remove_adapter(self, role: str, name: str) -> None:
        """Drop an adapter, with its gradients and its optimizer."""
        hosted = self._hosted(role)
        with_adapters(hosted.engine, name).remove_adapter(name)
        hosted.mini_batches.pop(name, None)

    def export_adapter(self, role: str, directory: Path, name: str, with_optimizer: bool) -> None:
        """Write an adapter in PEFT's format, with or without the optimizer's moments and steps. Collective."""
        with_adapters(self._engine(role), name).export_adapter(directory, name, with_optimizer=with_optimizer)

    def save(self, role: str, directory: Path) -> None:
        """Save the full training state. Collective."""
        self._engine(role).save(directory)

    def load(self, role: str, directory: Path, optimizer: bool = True) -> int:
        """See `Role.load`. Waits until the publisher no longer reads the parameters. Collective."""
        hosted = self._hosted(role)
        hosted.fence()
        hosted.engine.load(directory, optimizer=optimizer)
        hosted.mini_batches.clear()
        return hosted.engine.step

    def export_hf(self, role: str, directory: Path, dtype: str) -> None:
        """Write a Hugging Face model directory. Collective."""
        self._engine(role).export_hf(directory, dtype_of(dtype))

    def memory_use(self) -> MemoryUse:
        """The memory of this process on the device of its roles. On a CPU, copies of what is offloaded do not count as held."""
        engines = [hosted.engine for hosted in self._roles.values()]
        device = engines[0].device
        held, peak = memory_use(device)
        copies = sum(engine.offloaded_bytes for engine in engines) if device.type == "cpu" else 0
        return MemoryUse(held - copies, peak)

    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()

    def close(self) -> None:
        """Leave the run. Never raises."""
        hosted = list(self._roles.values())
        self._roles = {}
        for each in hosted:
            if each.publisher is not None:
                each.publisher.close()
        for each in reversed(hosted):  # the first one owns the ranks' process group
            each.engine.close()

    def _offload(self, hosted: HostedRole, parts: Collection[StatePart]) -> None:
        if "parameters" in parts and "parameters" not in hosted.engine.offloaded:
            hosted.fence_s += hosted.fence()
        hosted.engine.offload(parts)

    def _incomplete(self, mini_batch: OpenMiniBatch) -> ProtocolError:
        return ProtocolError(
            f"a part of the mini-batch has no gradient: {mini_batch.failed}",
            part=self._name,
            hint="optim_step ends the mini-batch, and changes nothing; then start it over.",
        )

    def _loss(self, role: str, loss: str | Loss) -> Loss:
        if not isinstance(loss, str):
            return loss
        losses = self._hosted(role).losses
        if loss not in losses:
            raise ProtocolError(
                f"the role {role!r} has no loss called {loss!r}.",
                part=self._name,
                hint=f"It has {', '.join(sorted(losses)) or 'none'}: name it in RoleSpec.losses, or pass the function.",
            )
        return losses[loss]

    def _engine(self, role: str) -> TrainingEngine:
        return self._hosted(role).engine

    def _hosted(self, role: str) -> HostedRole:
        if role not in self._roles:
            raise ProtocolError(f"the role {role!r} was used before setup.", part=self._name)
        return self._roles[role]


def _why(error: Exception) -> str:
    """Describe `error`; never empty, also for an error without a message, such as that of a bare ``assert``."""
    return str(error) or type(error).__name__
