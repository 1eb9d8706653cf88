"""`WorkerDispatch` and `Role`: calls to the models of an algorithm, whatever ranks they run on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from weightlane.ckpt_engines import ConfigError, ProtocolError, WeightlaneError
from weightlane.sync import CheckpointEngineConfig, Placement, SyncConfig
from weightlane.sync.publisher import publisher_name

from ..config import LoraConfig
from ..data.batch import LossDenominators, TokenBatch
from ..engines.adam_params import AdamParams
from ..engines.contract import STATE_PARTS, SequenceOutputs, StatePart
from ..engines.lora.joint import BackwardPart
from ..objectives.loss import LOGPROBS, Loss, OutputName
from .rank_worker import Answer
from .ranks import Ranks
from .residency import Moves, moves_before
from .role import RankOutputs, RoleSpec, StepPart, StepResult

_PART = "worker dispatch"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BackwardAnswer:
    """The answer to `Role.forward_backward`."""

    metrics: Mapping[str, float]
    """See `BackwardResult.metrics`."""
    outputs: Sequence[SequenceOutputs]
    """Outputs of each sequence, in the order of the batch; empty where none were asked for."""


class StagedBatch:
    """A batch that several calls use and that travels to each group of ranks once. Dropping it frees it there."""

    def __init__(self, batch: TokenBatch) -> None:
        self.batch = batch
        self._sent: dict[int, Any] = {}

    def on(self, ranks: Ranks) -> Any:
        """The batch as an argument of calls to `ranks`."""
        key = id(ranks)
        if key not in self._sent:
            self._sent[key] = ranks.put(self.batch)
        return self._sent[key]


class _Group:
    """Ranks, and the roles that they host."""

    def __init__(self, ranks: Ranks, roles: Sequence[str], *, shares_device: bool) -> None:
        self.ranks, self.roles, self._shares_device = ranks, roles, shares_device
        self.offloaded: Mapping[str, frozenset[StatePart]] = {}

    def call(self, role: str, method: str, *args: Any) -> Coroutine[Any, Any, list[Any]]:
        """Call `method` for `role` on every rank, now."""
        moves = moves_before(method, role, self.roles) if self._shares_device else Moves()
        return self._noted(self.ranks.call("call", role, moves, method, *args))

    async def start(self, specs: Sequence[RoleSpec]) -> dict[str, int]:
        """Load the roles' models, one after the other; the optimizer steps that each has taken."""
        address, steps = await self.ranks.rendezvous(), {}
        for spec in specs:
            steps[spec.name] = (await self.ranks.call("setup", spec, address))[0]
            if self._shares_device:  # for the next one
                everything = Moves({spec.name: frozenset(STATE_PARTS)})
                await self._noted(self.ranks.call("call", spec.name, everything, "rest"))
        return steps

    async def offload(self) -> None:
        """Move everything of every role off the device, until the next call brings back what it needs."""
        if self._shares_device:
            everything = Moves(dict.fromkeys(self.roles, frozenset(STATE_PARTS)))
            await self._noted(self.ranks.call("call", self.roles[0], everything, "rest"))

    async def _noted(self, calling: Any) -> list[Any]:
        answers: list[Answer] = await calling
        self.offloaded = answers[0].offloaded
        return [answer.value for answer in answers]


class Role:
    """A model on some ranks. Every call begins at once, in the order of the calls, and returns a task to await.

    No caller knows how many ranks there are: a batch is shared out among them, and outputs come in its order. A call to a role
    waits for earlier ones to its group of ranks, and runs beside those to other groups.
    """

    def __init__(self, spec: RoleSpec, group: _Group) -> None:
        self.spec = spec
        self._group = group

    @property
    def name(self) -> str:
        """The role's name."""
        return self.spec.name

    @property
    def on_device(self) -> frozenset[StatePart]:
        """The parts of its state that were on the device after the last call to its group that has been answered."""
        return frozenset(STATE_PARTS) - self._group.offloaded.get(self.name, frozenset())

    def forward(
        self,
        batch: TokenBatch | StagedBatch,
        outputs: Collection[OutputName] = LOGPROBS,
        top_k: int = 0,
        adapter: str | None = None,
    ) -> asyncio.Task[list[SequenceOutputs]]:
        """Outputs of each sequence, in the order of the batch, without gradient. See `TrainingEngine.forward`."""
        staged = batch if isinstance(batch, StagedBatch) else StagedBatch(batch)
        sent = staged.on(self._group.ranks)
        calling = self._group.call(self.name, "forward", sent, tuple(outputs), top_k, adapter)
        return _begun(_in_order(calling, len(staged.batch)))

    def forward_backward(
        self,
        batch: TokenBatch | StagedBatch,
        loss: str | Loss,
        denominators: LossDenominators | None = None,
        outputs: Collection[OutputName] = (),
        adapter: str | None = None,
    ) -> asyncio.Task[BackwardAnswer]:
        """Add the gradient of a loss over `batch` to the gradients. See `TrainingEngine.forward_backward`.

        Where this fails, the mini-batch of `adapter` does, and no other: its further parts and its step raise `ProtocolError`.

        Args:
            batch: The sequences.
            loss: The name of one of ``RoleSpec.losses``, or a loss that can be pickled.
            denominators: Tokens and sequences of the whole mini-batch; None if `batch` is all of it.
            outputs: What to return of the forward pass.
            adapter: The adapter that computes and whose gradient it is; "" for the model's own weights, None for what is
                published.
        """
        staged = batch if isinstance(batch, StagedBatch) else StagedBatch(batch)
        sent = staged.on(self._group.ranks)
        calling = self._group.call(self.name, "forward_backward", sent, loss, denominators, tuple(outputs), adapter)

        async def answer() -> BackwardAnswer:
            return _backward_answer(await calling, staged.batch, outputs)

        return _begun(answer())

    def optim_step(self, adapter: str | None = None, params: AdamParams | None = None) -> asyncio.Task[StepResult]:
        """Take the step for which gradients were added up, after the fence. See `TrainingEngine.optim_step`.

        Args:
            adapter: The adapter that is stepped, as in `forward_backward`.
            params: How AdamW steps; None: as the configuration says.
        """
        calling = self._group.call(self.name, "optim_step", adapter, params)

        async def slowest() -> StepResult:
            return StepResult.slowest(await calling)

        return _begun(slowest())

    def together(
        self, parts: Sequence[BackwardPart | StepPart]
    ) -> asyncio.Task[list[BackwardAnswer | StepResult | WeightlaneError]]:
        """Do what `forward_backward` and `optim_step` do for several adapters, each named once; `JoinsPasses` joins passes.

        Returns:
            What each call would have returned, or the error that it would have raised; one says nothing about the others.
        """
        calling = self._group.call(self.name, "together", self._group.ranks.put(list(parts)))

        async def answers() -> list[BackwardAnswer | StepResult | WeightlaneError]:
            found = zip(*await calling, strict=True)
            return [_answer_to(part, each) for part, each in zip(parts, found, strict=True)]

        return _begun(answers())

    def add_adapter(
        self, name: str, config: LoraConfig, source: Path | None = None, *, optimizer: bool = True
    ) -> asyncio.Task[int]:
        """Add an adapter that can be trained, in place of one of that name; the steps that it has taken.

        Args:
            name: See `TrainingEngine.add_adapter`.
            config: See there.
            source: A directory, readable on every rank, whose values it begins with; None for first values.
            optimizer: Whether it resumes the moments and steps that `export_adapter` wrote there, if there are any.

        Raises:
            ConfigError: As there, or the name is that of the adapter of ``trainer.lora``. One that was there stays.
            StorageError: A file in `source` cannot be read.
        """
        return self._steps("add_adapter", name, config, source, optimizer)

    def drop_gradient(self, adapter: str | None = None) -> asyncio.Task[None]:
        """Drop the gradients of an adapter's mini-batch, and whatever failed in it: it begins anew."""
        return self._done("drop_gradient", adapter)

    def remove_adapter(self, name: str) -> asyncio.Task[None]:
        """Drop an adapter that `add_adapter` made; `ConfigError` for any other."""
        return self._done("remove_adapter", name)

    def export_adapter(self, directory: Path, name: str, *, with_optimizer: bool) -> asyncio.Task[None]:
        """Write an adapter as PEFT does, with or without moments and steps beside it. See `TrainingEngine.export_adapter`."""
        return self._done("export_adapter", directory, name, with_optimizer)

    def publish(self, version: int, adapter: str | None = None) -> asyncio.Task[float]:
        """Publish the parameters as `version`; the longest time in seconds that a rank was blocked.

        With `adapter`, the version is that adapter, padded with zeros to the rank and the layers of the one of ``trainer.lora``.
        It is copied once the version before is read. See `TrainingEngine.load_published` for what it refuses.
        """
        calling = self._group.call(self.name, "publish", version, adapter)

        async def longest() -> float:
            seconds: list[float] = await calling
            return max(seconds)

        return _begun(longest())

    def save(self, directory: Path) -> asyncio.Task[None]:
        """Save the full training state."""
        return self._done("save", directory)

    def load(self, directory: Path, *, optimizer: bool = True) -> asyncio.Task[int]:
        """Resume from a saved state, or begin anew, as `TrainingEngine.load` does; the steps taken."""
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
        """Make every rank's publisher of this role."""
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

        return _begun(steps())

    def _done(self, method: str, *args: Any) -> asyncio.Task[None]:
        calling = self._group.call(self.name, method, *args)

        async def finish() -> None:
            await calling

        return _begun(finish())


class WorkerDispatch:
    """The roles of an algorithm, on one or several groups of ranks.

    Roles of one group share its processes and devices. With `shares_device`, there is room for one of them at a time: before a
    call, the parts of its state that it needs are brought onto the device, and those of the other roles are moved to the host's
    memory; while a version is published, neither gradients nor optimizer state stay on it.

    Args:
        roles: The roles.
        groups: Groups of ranks by the names that roles give.
        shares_device: Whether roles take turns on the device, by group; or rollouts do with a group's only role. By default,
            everything stays on it.

    Raises:
        ConfigError: Two roles have one name, a group is missing, has another number of ranks than a role, or cannot host its
            roles together.
    """

    def __init__(
        self,
        roles: Sequence[RoleSpec],
        groups: Mapping[str, Ranks],
        shares_device: Mapping[str, bool] | None = None,
    ) -> None:
        _check(roles, groups)
        self._groups = {}
        for name, ranks in groups.items():
            hosted = [spec.name for spec in roles if spec.group == name]
            self._groups[name] = _Group(ranks, hosted, shares_device=(shares_device or {}).get(name, False))
        self._roles = {spec.name: Role(spec, self._groups[spec.group]) for spec in roles}

    def __getitem__(self, role: str) -> Role:
        """The role of that name; `ProtocolError` if there is none."""
        if role not in self._roles:
            raise ProtocolError(
                f"there is no role {role!r}.", part=_PART, hint=f"The roles are {', '.join(sorted(self._roles))}."
            )
        return self._roles[role]

    def __contains__(self, role: str) -> bool:
        return role in self._roles

    async def start(self) -> dict[str, int]:
        """Start all ranks and load every role's model; the optimizer steps that each has taken so far."""
        starting = [group.start([self._roles[role].spec for role in group.roles]) for group in self._groups.values()]
        return {role: step for steps in await asyncio.gather(*starting) for role, step in steps.items()}

    def stage(self, batch: TokenBatch) -> StagedBatch:
        """A batch for several calls, which travels once."""
        return StagedBatch(batch)

    async def offload(self) -> None:
        """Move everything of the roles that share a device off it, for rollouts that take turns with them.

        The next call to a role brings back what it needs. Groups that share no device keep everything there.
        """
        await asyncio.gather(*(group.offload() for group in self._groups.values()))

    async def watch(self) -> NoReturn:
        """Raise `WorkerDiedError` when a process of any rank dies."""
        watching = [asyncio.create_task(group.ranks.watch()) for group in self._groups.values()]
        try:
            await asyncio.gather(*watching)
            raise AssertionError
        finally:
            for each in watching:
                each.cancel()

    async def close(self) -> None:
        """End every rank. Never raises."""
        await asyncio.gather(*(group.ranks.close() for group in self._groups.values()))


def _check(roles: Sequence[RoleSpec], groups: Mapping[str, Ranks]) -> None:
    if twice := [name for name, count in Counter(spec.name for spec in roles).items() if count > 1]:
        raise ConfigError(f"two roles are called {twice[0]!r}.", part=_PART)
    for spec in roles:
        if spec.group not in groups:
            raise ConfigError(
                f"role {spec.name!r} runs on the group {spec.group!r}, which is not there.",
                part=_PART,
                hint=f"Groups are {', '.join(sorted(groups)) or 'none'}.",
            )
        if spec.config.ranks != groups[spec.group].world:
            raise ConfigError(
                f"role {spec.name!r} has {spec.config.ranks} ranks, and its group {spec.group!r} {groups[spec.group].world}.",
                part=_PART,
                hint="Roles that share processes have as many ranks; give this one a group of its own.",
            )
        engines = Counter(other.config.engine for other in roles if other.group == spec.group)
        if engines["megatron"] > 1:
            raise ConfigError(
                f"the group {spec.group!r} hosts two roles of the megatron engine, whose process groups are global.",
                part=_PART,
                hint="Give one of them a group of its own.",
            )


def _begun(running: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    return asyncio.get_running_loop().create_task(running)


def _answer_to(part: BackwardPart | StepPart, found: Sequence[Any]) -> BackwardAnswer | StepResult | WeightlaneError:
    """The answer that the ranks' answers to a part are together."""
    if failed := [each for each in found if isinstance(each, WeightlaneError)]:
        return failed[0]
    return (
        StepResult.slowest(found) if isinstance(part, StepPart) else _backward_answer(found, part.batch, part.outputs)
    )


def _backward_answer(found: Sequence[Any], batch: TokenBatch, outputs: Collection[OutputName]) -> BackwardAnswer:
    return BackwardAnswer(found[0][0], _joined([each for _, each in found], len(batch)) if outputs else [])


async def _in_order(calling: Coroutine[Any, Any, list[RankOutputs]], count: int) -> list[SequenceOutputs]:
    return _joined(await calling, count)


def _joined(answers: Sequence[RankOutputs], count: int) -> list[SequenceOutputs]:
    found: dict[int, SequenceOutputs] = {}
    for answer in answers:
        found |= answer.by_sequence()
    if missing := [index for index in range(count) if index not in found]:
        raise ProtocolError(
            f"no rank has the outputs of sequence {missing[0]}.", part=_PART, hint="Its training engine lost them."
        )
    return [found[index] for index in range(count)]
