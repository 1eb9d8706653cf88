"""`Role`: calls to one model of an algorithm, whatever ranks it runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from weightlane.ckpt_engines import WeightlaneError
from weightlane.sync import CheckpointEngineConfig, Placement, SyncConfig
from weightlane.sync.publisher import publisher_name

from ..config import LoraConfig
from ..data.batch import LossDenominators, TokenBatch
from ..data.step_result import StepResult
from ..engines.contract import BackwardAnswer, ForwardBackward, OptimStep, SequenceOutputs
from ..engines.optimizer_settings import AdamParams
from ..objectives.loss import LOGPROBS, Loss, OutputName
from .rank_outputs import joined
from .role_group import RoleGroup
from .role_spec import RoleSpec

_T = TypeVar("_T")


class Role:
    """A model on some ranks. Calls begin at once, in the order in which they are made, and return tasks to await.

    The number of ranks is hidden from callers: a batch is divided among the ranks, and outputs are in the order of the batch. A
    call waits for earlier calls to the same group of ranks, and runs concurrently with calls to other groups.
    """

    def __init__(self, spec: RoleSpec, group: RoleGroup) -> None:
        self.spec = spec
        self._group = group

    @property
    def name(self) -> str:
        """The role's name."""
        return self.spec.name

    def forward(
        self,
        batch: TokenBatch,
        outputs: Collection[OutputName] = LOGPROBS,
        top_k: int = 0,
        adapter: str | None = None,
    ) -> asyncio.Task[list[SequenceOutputs]]:
        """Outputs of each sequence, in the order of the batch, without gradient. See `TrainingEngine.forward`."""
        sent = self._group.ranks.put(batch)
        calling = self._group.call(self.name, "forward", sent, tuple(outputs), top_k, adapter)

        async def in_order() -> list[SequenceOutputs]:
            return joined(await calling, len(batch))

        return _started(in_order())

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
        calling = self._group.call(self.name, "forward_backward", sent, loss, denominators, tuple(outputs), adapter)

        async def answer() -> BackwardAnswer:
            return _backward_answer(await calling, batch, outputs)

        return _started(answer())

    def optim_step(self, adapter: str | None = None, params: AdamParams | None = None) -> asyncio.Task[StepResult]:
        """Take the optimizer step with the accumulated gradients, after the fence. See `TrainingEngine.optim_step`.

        Args:
            adapter: The adapter that is stepped, as in `forward_backward`.
            params: AdamW's settings for this step; None: those of the configuration.
        """
        calling = self._group.call(self.name, "optim_step", adapter, params)

        async def slowest() -> StepResult:
            return StepResult.slowest(await calling)

        return _started(slowest())

    def together(
        self, calls: Sequence[ForwardBackward | OptimStep]
    ) -> asyncio.Task[list[BackwardAnswer | StepResult | WeightlaneError]]:
        """Carry out `forward_backward` and `optim_step` for several adapters, each named once.

        Passes are joined as `AdapterEngine.forward_backward_together` does.

        Returns:
            The result or the error of each call. An error of one call does not affect the others.
        """
        calling = self._group.call(self.name, "together", self._group.ranks.put(list(calls)))

        async def answers() -> list[BackwardAnswer | StepResult | WeightlaneError]:
            found = zip(*await calling, strict=True)
            return [_answer_to(call, each) for call, each in zip(calls, found, strict=True)]

        return _started(answers())

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
        return self._steps("add_adapter", name, config, source, optimizer)

    def drop_gradient(self, adapter: str | None = None) -> asyncio.Task[None]:
        """Drop the gradients of an adapter's mini-batch, and the record of its failure, so that it can start over."""
        return self._done("drop_gradient", adapter)

    def remove_adapter(self, name: str) -> asyncio.Task[None]:
        """Drop an adapter that `add_adapter` made; `ConfigError` for any other."""
        return self._done("remove_adapter", name)

    def export_adapter(self, directory: Path, name: str, *, with_optimizer: bool) -> asyncio.Task[None]:
        """Write an adapter in PEFT's format, with or without its optimizer's state. See `AdapterEngine.export_adapter`."""
        return self._done("export_adapter", directory, name, with_optimizer)

    def publish(self, version: int, adapter: str | None = None) -> asyncio.Task[float]:
        """Publish the parameters as `version`. Returns the longest time in seconds that a rank was blocked.

        With `adapter`, the version is that adapter, padded with zeros to the rank and the layers of the one of ``trainer.lora``.
        It is copied once the previous version has been read. See `AdapterEngine.load_published` for what it refuses.
        """
        calling = self._group.call(self.name, "publish", version, adapter)

        async def longest() -> float:
            seconds: list[float] = await calling
            return max(seconds)

        return _started(longest())

    def save(self, directory: Path) -> asyncio.Task[None]:
        """Save the full training state."""
        return self._done("save", directory)

    def load(self, directory: Path, *, optimizer: bool = True) -> asyncio.Task[int]:
        """Resume from a saved state, or start over from a model, as `TrainingEngine.load` does. Returns the steps taken."""
        return self._steps("load", directory, optimizer)

    def export_hf(self, directory: Path, dtype: str) -> asyncio.Task[None]:
        """Write a Hugging Face model directory with weights in `dtype`."""
        return self._done("export_hf", directory, dtype)

    async def connect(
        self,
        rendezvous: Mapping[str, Any],
        transport: CheckpointEngineConfig,
        sync: SyncConfig,
        wire_dtype: torch.dtype,
    ) -> None:
        """Create every rank's publisher of this role."""
        dtype = str(wire_dtype).removeprefix("torch.")
        placements: list[Placement] = await self._group.call(self.name, "placement", dtype)
        await self._group.call(self.name, "connect", dict(rendezvous), transport, sync, dtype, placements)

    def publisher_names(self) -> list[str]:
        """The names under which its ranks publish, in rank order."""
        return [publisher_name(rank) for rank in range(self._group.ranks.world)]

    def _steps(self, method: str, *args: Any) -> asyncio.Task[int]:
        calling = self._group.call(self.name, method, *args)

        async def steps() -> int:
            return int((await calling)[0])

        return _started(steps())

    def _done(self, method: str, *args: Any) -> asyncio.Task[None]:
        calling = self._group.call(self.name, method, *args)

        async def finish() -> None:
            await calling

        return _started(finish())


def _started(running: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    return asyncio.get_running_loop().create_task(running)


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
