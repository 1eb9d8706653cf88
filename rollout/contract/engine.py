"""`RolloutEngine`: what generates in a replica, and what it can do."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from weightlane.ckpt_engines import ConfigError, DeadlineExceededError, WeightlaneError, WorkerDiedError
from weightlane.ckpt_engines.runtime.process_memory import MemoryUse
from weightlane.sync import CommitMode, Placement

from ..config import RolloutConfig
from .records import Completion
from .requests import GenerationRequest

SleepPart = Literal["weights", "caches"]
"""The parts of a replica's memory that are taken back one after the other: weights first, so that a version can be committed
before there is memory for caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCapabilities:
    """The abilities of a rollout engine. A configuration that asks for more is refused before anything starts."""

    summary: str
    """One sentence about the engine, for ``weightlane engines``."""
    commit_modes: frozenset[CommitMode] = frozenset({"staged"})
    """The values of `RolloutConfig.commit` that it takes."""
    tensor_parallel: bool = False
    """Whether a replica may have several ranks."""
    adapters: bool = False
    """Whether versions may be low-rank adapters, of which requests name one."""
    keeps_caches: bool = True
    """Whether it takes ``kv_on_commit = "keep"``."""
    extra_arguments: bool = False
    """Whether it takes `RolloutConfig.extra_engine_args`."""
    sleeps: bool = False
    """Whether `RolloutEngine.sleep` frees its memory, and `RolloutEngine.wake` takes it back."""
    routed_experts: bool = False
    """Whether completions have `Completion.routed_experts` if `RolloutConfig.routed_experts` asks for them."""


@dataclass(frozen=True, slots=True)
class PlannedNeeds:
    """The needs of one replica; all replicas of a run are alike."""

    ranks: tuple[Placement | None, ...]
    """The slices that each rank asks for; None for complete tensors."""
    dtype: str = ""
    """The dtype that the replica computes in; empty if it could not be found out."""
    why_whole: str = ""
    """The reason why ranks ask for complete tensors; empty if they ask for slices."""


class UpdateFigures(NamedTuple):
    """Costs of one update of the weights."""

    blocked_s: float
    """Seconds in which nothing was generated."""
    load_s: float
    """Seconds of `blocked_s` in which the weights changed."""
    recomputed_tokens: int = 0
    """Tokens that requests in flight prefill again."""


class RolloutEngine(ABC):
    """One replica's engine. A `LocalReplica` drives it from one event loop.

        1. Engine(name, config, model_dir)       cheap, starts nothing
        2. start(version)                         loads the checkpoint, which serves as `version`
        3. connect(fields)                        subscribes every rank; again whenever the replica joins another publisher
        4. generate(request, arrived)             many at once
           update(fields, ...)                    one at a time, while requests are in flight
           abort(keys)                            requests in flight then end with any error
           sleep(), wake(part), memory_use()      of an engine whose capabilities say that it `sleeps`; nothing is in flight
        5. close()                                any number of times

    The replica keeps deadlines of requests, versions, quarantines, statistics and hooks. The engine raises typed errors.
    """

    capabilities: ClassVar[RolloutCapabilities]

    def __init__(self, name: str, config: RolloutConfig, model_dir: str | os.PathLike[str]) -> None:
        self.name = name
        self.config = config
        self.model_dir = Path(model_dir)
        self.dtype = ""
        """The dtype that the engine computes in, without "torch."; known after `start`."""
        self.max_model_len = 0
        """Most tokens of a prompt and its completion together; known after `start`."""
        self.vocab_size = 0
        """Number of token ids of the model; known after `start`."""

    @classmethod
    def check(cls, config: RolloutConfig, model_dir: Path) -> str:  # noqa: ARG003 - for engines that check
        """Raise the `ConfigError` with which `start` and `connect` would refuse the configuration or the model.

        Returns what could not be found out without weights; empty if nothing.
        """
        return ""

    @classmethod
    def planned_needs(cls, config: RolloutConfig, model_dir: Path) -> PlannedNeeds:  # noqa: ARG003 - as above
        """Return what the ranks of a replica will ask for, before there is one. Raises `ConfigError` as `check`."""
        return PlannedNeeds((None,) * config.tensor_parallel, config.dtype, f"{config.engine} takes whole tensors")

    @classmethod
    def environment(cls, config: RolloutConfig) -> dict[str, str]:  # noqa: ARG003 - as above
        """Environment variables of the process of a replica, if a process is started for it."""
        return {}

    @property
    @abstractmethod
    def open(self) -> bool:
        """Whether the engine was started and not closed."""

    @property
    def dead(self) -> bool:
        """Whether the engine can never answer again, for example because its processes have died."""
        return False

    @abstractmethod
    async def start(self, version: int) -> None:
        """Load the model and serve it as `version`.

        Raises:
            ConfigError: The model or an option is refused.
            WorkerDiedError: A process ended while starting.
            DeadlineExceededError: The start took longer than `RolloutConfig.start_limit_s`.
        """

    @abstractmethod
    async def connect(self, fields: Mapping[str, Any]) -> None:
        """Leave the publisher that the ranks are subscribed to, if any, and subscribe to that of a `ConnectRequest`.

        `ReceivingRank.connect` does this for a rank. Raises the first rank's typed error; no rank is subscribed then.
        """

    @abstractmethod
    async def generate(self, request: GenerationRequest, arrived: Callable[[int], None]) -> Completion:
        """Generate one completion; updates of the weights may happen meanwhile.

        Every token has the version of the weights that computed it. `arrived` is called with the number of new tokens, on the
        event loop, as soon as they are there.

        Raises:
            ConfigError: This request is refused; others continue.
            ClosedError: `abort` or `close` has ended it.
            WorkerDiedError: The engine is gone.
        """

    @abstractmethod
    async def update(self, fields: Mapping[str, Any], *, serves: int, trusted: bool) -> UpdateFigures:
        """Make an `UpdateRequest` on every rank at the same step: commit a staged version, or roll one back.

        Later tokens carry the version `serves`. Caches follow `RolloutConfig.kv_on_commit`, and requests that begin later never
        use those of earlier weights. `trusted` says whether the weights are known to be one complete version now.

        Raises:
            UntouchedError: The weights are `trusted`, in place on every rank, and serve.
            WorkerDiedError: The engine is gone.
            QuarantinedError: Any other failure. The replica then accepts no request until an update has succeeded.
        """

    async def sleep(self) -> None:
        """Free the memory of weights and caches on every rank. No request is in flight, and no update runs.

        The weights are lost: after `wake`, the engine generates nothing until an update has succeeded that was not `trusted`.
        An update while the weights are asleep fails.

        Raises:
            WorkerDiedError: The engine is gone.
            QuarantinedError: Any other failure.
        """
        raise ConfigError(f"{self.config.engine} cannot sleep.", part=self.name, hint="Choose another rollout.engine.")

    async def wake(self, part: SleepPart) -> None:
        """Take back the memory of the weights, or that of the caches, which are empty then. Raises as `sleep`."""
        raise ConfigError(f"{self.config.engine} cannot wake its {part}.", part=self.name)

    async def memory_use(self) -> Sequence[MemoryUse]:
        """The memory that each rank holds, and its peak since the call before. Raises as `sleep`."""
        raise ConfigError(f"{self.config.engine} does not tell its memory.", part=self.name)

    @abstractmethod
    async def abort(self, keys: Collection[str]) -> None:
        """End requests in flight by their `GenerationRequest.key`. Never raises."""

    @abstractmethod
    async def close(self) -> None:
        """End the engine, its processes and threads. Requests in flight have been aborted. Idempotent, never raises."""

    def late(self, what: str) -> DeadlineExceededError:
        """The error of an action that took longer than `RolloutConfig.commit_timeout_s`; `what` says what did not happen."""
        return DeadlineExceededError(
            f"{what} within {self.config.commit_timeout_s:.0f} s.",
            part=self.name,
            hint="Raise rollout.commit_timeout_s.",
        )

    def died(self) -> WeightlaneError:
        """The error that says that the engine is `dead`."""
        return WorkerDiedError("the engine is gone.", part=self.name, peer=self.name)
