"""`Role`: calls to one model of an algorithm, whatever ranks it runs on; and `RoleGroup`, ranks that host roles."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from weightlane.ckpt_engines import WeightlaneError
from weightlane.sync import CheckpointEngineConfig, Placement, SyncConfig
from weightlane.sync.publisher import publisher_name

from ..config import LoraConfig
from ..data.batch import LossDenominators, TokenBatch
from ..data.step_result import StepResult
from ..engines.contract import STATE_PARTS, BackwardAnswer, ForwardBackward, OptimStep, SequenceOutputs
from ..engines.optimizers.settings import AdamParams
from ..objectives.loss import LOGPROBS, Loss, OutputName
from .rank_outputs import joined
from .ranks import Ranks
from .residency import Moves, moves_before
from .role_spec import RoleSpec

_T = TypeVar("_T")


class RoleGroup:
    """Ranks that host roles, which take turns on the ranks' devices if `shares_device`; see `WorkerDispatch`."""

    def __init__(self, ranks: Ranks, specs: Sequence[RoleSpec], *, shares_device: bool) -> None:
        self.ranks, self._specs, self._shares_device = ranks, specs, shares_device
        self._roles = [spec.name for spec in specs]

    def call(self, role: str, method: str, *args: Any) -> Awaitable[list[Any]]:
        """Call `method` for `role` on every rank at once. Returns the answers in rank order."""
        moves = moves_before(method, role, self._roles) if self._shares_device else Moves()
        return self.ranks.call("call", role, moves, method, *args)

    async def start(self) -> dict[str, int]:
        """Load the roles' models, one after the other. Returns the optimizer steps that each has taken."""
        address, steps = await self.ranks.rendezvous(), {}
        for spec in self._specs:
            steps[spec.name] = (await self.ranks.call("setup", spec, address))[0]
            if self._shares_device:
                await self._offload(spec.name)  # to make room for the next one
        return steps

    async def offload(self) -> None:
        """Move the state of roles that share the device to host memory. The next call moves back the parts that it needs."""
        if self._shares_device:
            await self._offload(*self._roles)

    async def _offload(self, *roles: str) -> None:
        everything = Moves(dict.fromkeys(roles, frozenset(STATE_PARTS)))
        await self.ranks.call("call", roles[0], everything, "rest")


class Role:
    """A model on some ranks. Calls begin at once, in the order in which they are made, and return tasks to await.

    The number of ranks is hidden from callers: a batch is divided among the ranks, and outputs are in the order of the batch. A
    call waits for earlier calls to the same group of ranks, and runs concurrently with calls to other groups.
    """

    def __init__(self, spec: RoleSpec, group: RoleGroup) -> None:
        self.spec = spec
        self._group = group

    def forward(
        self,
        batch: TokenBatch,
        outputs: Collection[OutputName] = LOGPROBS,
        top_k: int = 0,
        adapter: str | None = None,
    ) -> asyncio.Task[list[SequenceOutputs]]:
        """Outputs of each sequence, in the order of the batch, without gradient. See `TrainingEngine.forward`."""
        sent = self._group.ranks.put(batch)
        return self._call(lambda found: joined(found, len(batch)), "forward", sent, tuple(outputs), top_k, adapter)

    def forward_backward(
        self,
        batch: TokenBatch,
        loss: str | Loss,
        denominators: LossDenominators | None = None,
        outputs: Collection[OutputName] = (),
        adapter: str | None = None,
    ) -> asyncio.Task[BackwardAnswer]:
        """Add the gradient of a loss over `batch` to the gradients. See `TrainingEngine.forward_backward`.

        A failure fails the mini-batch of `adapter`, and no other: its further parts and its step raise `ProtocolError`.

        Args:
            batch: The sequences.
            loss: The name of one of ``RoleSpec.losses``, or a loss that can be pickled.
            denominators: Tokens and sequences of the full mini-batch; None if `batch` is all of it.
            outputs: Outputs of the forward pass to return.
            adapter: The adapter that is computed with and gets the gradient; "" for the model's own weights, None for the
                adapter of ``trainer.lora``, or for the model's own weights without one.
        """
        sent = self._group.ranks.put(batch)

        def answer(found: Sequence[Any]) -> BackwardAnswer:
            return _backward_answer(found, batch, outputs)

        return self._call(answer, "forward_backward", sent, loss, denominators, tuple(outputs), adapter)

    def optim_step(self, adapter: str | None = None, params: AdamParams | None = None) -> asyncio.Task[StepResult]:
        """Take the optimizer step with the accumulated gradients, after the fence. See `TrainingEngine.optim_step`.

        `adapter` is as in `forward_backward`. `params` are AdamW's settings for this step; None: those of the configuration.
        """
        return self._call(StepResult.slowest, "optim_step", adapter, params)

    def together(
        self, calls: Sequence[ForwardBackward | OptimStep]
    ) -> asyncio.Task[list[BackwardAnswer | StepResult | WeightlaneError]]:
        """Carry out `forward_backward` and `optim_step` for several adapters, each named once.

        Passes are joined as `AdapterEngine.forward_backward_together` does. Returns the result or the error of each call; the
        error of one does not affect the others.
        """

        def answers(found: Sequence[Any]) -> list[BackwardAnswer | StepResult | WeightlaneError]:
            return [_answer_to(call, each) for call, each in zip(calls, zip(*found, strict=True), strict=True)]

        return self._call(answers, "together", self._group.ranks.put(list(calls)))

    def add_adapter(
        self, name: str, config: LoraConfig, source: Path | None = None, *, optimizer: bool = True
    ) -> asyncio.Task[int]:
        """Add a trainable adapter, which replaces one of that name. Returns the steps that it has taken.

        Args:
            name: See `AdapterEngine.add_adapter`.
            config: Its settings, as there.
            source: A directory, readable on every rank, with its initial values; None for fresh ones.
            optimizer: Whether to resume the moments and steps that `export_adapter` wrote to `source`, if there are any.

        Raises:
            ConfigError: As there, or the name is that of the adapter of ``trainer.lora``. An existing adapter is kept.
            StorageError: A file in `source` cannot be read.
        """
        return self._call(_first, "add_adapter", name, config, source, optimizer)

    def drop_gradient(self, adapter: str | None = None) -> asyncio.Task[None]:
        """Drop the gradients of an adapter's mini-batch, and the record of its failure, so that it can start over."""
        return self._call(_nothing, "drop_gradient", adapter)

    def fail_mini_batch(self, reason: str, adapter: str | None = None) -> asyncio.Task[None]:
        """Fail the mini-batch of an adapter because of `reason`, as a part of it that fails does. See `forward_backward`."""
        return self._call(_nothing, "fail_mini_batch", reason, adapter)

    def remove_adapter(self, name: str) -> asyncio.Task[None]:
        """Drop an adapter that `add_adapter` made; `ConfigError` for any other."""
        return self._call(_nothing, "remove_adapter", name)

    def export_adapter(self, directory: Path, name: str, *, with_optimizer: bool) -> asyncio.Task[None]:
        """Write an adapter in PEFT's format, with or without its optimizer's state. See `AdapterEngine.export_adapter`."""
        return self._call(_nothing, "export_adapter", directory, name, with_optimizer)

    def publish(self, version: int, adapter: str | None = None) -> asyncio.Task[float]:
        """Publish the parameters as `version`. Returns the longest time in seconds that a rank was blocked.

        With `adapter`, the version is that adapter, padded with zeros to the rank and the layers of the one of ``trainer.lora``.
        It is copied once the previous version has been read. See `AdapterEngine.load_published` for what it refuses.
        """
        return self._call(max, "publish", version, adapter)

    def wait_stored(self, version: int, timeout_s: float) -> asyncio.Task[None]:
        """Wait until an engine that stores versions has committed `version`, which serves. See `Publisher.wait_stored`."""
        return self._call(_nothing, "wait_stored", version, timeout_s)

    def save(self, directory: Path) -> asyncio.Task[None]:
        """Save the full training state."""
        return self._call(_nothing, "save", directory)

    def load(self, directory: Path, *, optimizer: bool = True) -> asyncio.Task[int]:
        """Resume from a saved state, or start over from a model, as `TrainingEngine.load` does. Returns the steps taken."""
        return self._call(_first, "load", directory, optimizer)

    def export_hf(self, directory: Path, dtype: str) -> asyncio.Task[None]:
        """Write a Hugging Face model directory with weights in `dtype`."""
        return self._call(_nothing, "export_hf", directory, dtype)

    async def connect(
        self,
        rendezvous: Mapping[str, Any],
        transport: CheckpointEngineConfig,
        sync: SyncConfig,
        wire_dtype: torch.dtype,
    ) -> None:
        """Create every rank's publisher of this role."""
        dtype = str(wire_dtype).removeprefix("torch.")
        placements: list[Placement] = await self._group.call(self.spec.name, "placement", dtype)
        await self._group.call(self.spec.name, "connect", dict(rendezvous), transport, sync, dtype, placements)

    def publisher_names(self) -> list[str]:
        """The names under which its ranks publish, in rank order."""
        return [publisher_name(rank) for rank in range(self._group.ranks.world)]

    def _call(self, merged: Callable[[list[Any]], _T], method: str, *args: Any) -> asyncio.Task[_T]:
        """Call `method` on every rank at once. Returns a task of the ranks' answers, merged."""
        calling = self._group.call(self.spec.name, method, *args)

        async def answer() -> _T:
            return merged(await calling)

        return asyncio.get_running_loop().create_task(answer())


def _nothing(_: Sequence[Any]) -> None:
    """Merge the answers of calls without a result."""


def _first(found: Sequence[int]) -> int:
    """Merge answers that are the same on every rank."""
    return found[0]


def _answer_to(
    call: ForwardBackward | OptimStep, found: Sequence[Any]
) -> BackwardAnswer | StepResult | WeightlaneError:
    """Merge the ranks' answers to a call into one."""
    if failed := [each for each in found if isinstance(each, WeightlaneError)]:
        return failed[0]
    if isinstance(call, OptimStep):
        return StepResult.slowest(found)
    return _backward_answer(found, call.batch, call.outputs)


def _backward_answer(found: Sequence[Any], batch: TokenBatch, outputs: Collection[OutputName]) -> BackwardAnswer:
    return BackwardAnswer(found[0][0], joined([each for _, each in found], len(batch)) if outputs else [])
