"""`VllmEngine`: the rollout engine `vllm`, one vLLM engine with its processes, from start to close."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from weightlane.ckpt_engines import (
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    QuarantinedError,
    WeightlaneError,
    WorkerDiedError,
)
from weightlane.ckpt_engines.runtime.process_memory import MemoryUse

from ..commit.receiving_rank import not_connected
from ..commit.remote_failure import failure_from_text, quarantined, untouched
from ..commit.transfer_calls import CACHES, DEEP, ENGINE_SHARE, MEMORY_USE, WEIGHTS, EngineCommit
from ..config import RolloutConfig
from ..contract.cleaner import Cleaner
from ..contract.engine import PlannedNeeds, RolloutCapabilities, RolloutEngine, SleepPart, UpdateFigures
from ..contract.limits import limited, on_thread
from ..contract.named_segments import segments_of_trees
from ..contract.records import Completion
from ..contract.requests import GenerationRequest, tokenizer_for_stop_strings
from ..layout.loading.refused_models import refusal_by_vllm
from .environment import child_environment, replica_config
from .generation import generate

_CLOSE_TIMEOUT_S = 10.0
"""Most seconds that each step of a shutdown may take, so that a hung engine cannot block its owner."""

T = TypeVar("T")


class VllmEngine(RolloutEngine):
    """vLLM, unchanged, with weightlane as its weight-transfer engine."""

    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities(
        summary="vLLM, in processes of its own: pauses of milliseconds, tensor parallel, adapters.",
        commit_modes=frozenset({"staged", "in_place"}),
        tensor_parallel=True,
        adapters=True,
        extra_arguments=True,
        sleeps=True,
        routed_experts=True,
    )

    def __init__(self, name: str, config: RolloutConfig, model_dir: str | os.PathLike[str]) -> None:
        super().__init__(name, config, model_dir)
        self._engine: Any = None
        self._cleaner: Cleaner | None = None
        self._processes: Sequence[Any] = ()
        """Those of vLLM's engine core, as `multiprocessing` has them."""
        self._building = threading.Lock()
        """Held while vLLM's engine is made: that of a start that was given up ends before the next one begins."""

    @classmethod
    def check(cls, config: RolloutConfig, model_dir: Path) -> str:
        """Ask vLLM, in a process of its own: see `check_replica`."""
        from .checked_replica import check_replica  # noqa: PLC0415 - imports torch

        return check_replica(config, model_dir)

    @classmethod
    def planned_needs(cls, config: RolloutConfig, model_dir: Path) -> PlannedNeeds:
        """Trace loading without weights, in a process of its own: see `weightlane.rollout.layout.offline.planned_needs`."""
        from ..layout.offline.planned_needs import planned_needs  # noqa: PLC0415 - imports vLLM

        return planned_needs(config, model_dir)

    @classmethod
    def environment(cls, config: RolloutConfig) -> dict[str, str]:
        """See `child_environment`."""
        return child_environment(config)

    @property
    def open(self) -> bool:
        """Whether the engine was started and not closed; its processes may have died."""
        return self._engine is not None

    @property
    def dead(self) -> bool:
        """Whether the engine's processes have died."""
        return self._engine is not None and bool(self._engine.errored)

    @property
    def running(self) -> Any:
        """The ``AsyncLLM`` of vLLM; raises `ClosedError` before `start` and after `close`."""
        if self._engine is None:
            raise ClosedError("the replica is not running.", part=self.name)
        return self._engine

    async def start(self, version: int) -> None:
        """Load the model in new processes, and serve it as `version`."""
        if not self.model_dir.is_dir():
            raise ConfigError(f"model directory {self.model_dir} does not exist.", part=self.name)
        limit_s, given_up = self.config.start_limit_s, threading.Event()
        late = f"the engine did not start within {limit_s:.0f} s."
        try:
            async with limited(
                limit_s, DeadlineExceededError(late, part=self.name, hint="Raise rollout.start_timeout_s.")
            ):
                await on_thread(self._build, given_up)
                await self.running.update_weight_version(str(version))
            # Garbage collection of everything that the start made would stop the event loop for 0.3 s at a time.
            gc.collect()
            gc.freeze()
        except WeightlaneError:
            raise
        except Exception as cause:
            if isinstance(cause, (ValueError, TypeError, OSError)) and not isinstance(cause, TimeoutError):
                raise refusal_by_vllm(cause, f"start from {self.model_dir}", part=self.name) from cause
            raise WorkerDiedError(
                f"the engine ended while starting: {cause}.", part=self.name, hint="The replica's log has the cause."
            ) from cause
        finally:
            given_up.set()

    async def connect(self, fields: Mapping[str, Any]) -> None:
        """Call ``init_weight_transfer_engine``. Raises the first rank's typed error."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest  # noqa: PLC0415 - slow to import

        engine, limit_s = self.running, self.config.connect_timeout_s
        try:
            async with limited(limit_s, not_connected(limit_s, self.name)):
                await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(fields)))
        except Exception as cause:
            raise self.typed(cause) from cause

    async def generate(self, request: GenerationRequest, arrived: Callable[[int], None]) -> Completion:
        """Generate one completion."""
        engine = self.running
        try:
            if request.sampling.stop_strings:
                await self._need_tokenizer()
            return await generate(engine, request, arrived, self.name)
        except Exception as cause:
            raise self.typed(cause) from cause

    async def _need_tokenizer(self) -> None:
        """Load the model's tokenizer, with which vLLM looks for stop strings, unless it has been loaded.

        Engines start without one, since prompts and completions are token ids. Raises `ConfigError` if there is none.
        """
        processor = self.running.output_processor
        if processor.tokenizer is not None:
            return
        from vllm.tokenizers import get_tokenizer  # noqa: PLC0415 - slow to import

        model = self.running.model_config
        options = {"tokenizer_mode": model.tokenizer_mode, "trust_remote_code": model.trust_remote_code}
        load = partial(get_tokenizer, model.tokenizer, **options)
        processor.tokenizer = await asyncio.to_thread(tokenizer_for_stop_strings, load, self.name)

    async def update(self, fields: Mapping[str, Any], *, serves: int, trusted: bool) -> UpdateFigures:
        """Let every rank make the update while nothing is generated. One that is cancelled continues in the engine.

        If it fails before the weights changed, and they are `trusted`, the engine resumes with them; else it stays paused.
        """
        limit_s = self.config.commit_timeout_s
        options = EngineCommit(
            weight_version=str(serves),
            # Cached blocks belong to one adapter, which stays what it is.
            caches=self.config.kv_on_commit if self.config.adapter is None else "keep",
            within_s=ENGINE_SHARE * limit_s,
            trusted=trusted,
        )
        info = {**fields, "engine_commit": options.model_dump()}
        try:
            async with limited(limit_s, self.late("the weights were not replaced")):
                (figures,) = await self.running.collective_rpc("update_weights", kwargs={"update_info": info})
        except Exception as cause:
            error, intact = self._diagnosed(cause)
            if intact and trusted:
                raise untouched(error, self.name) from cause
            if isinstance(error, WorkerDiedError):
                raise error from cause
            raise quarantined(error, self.name, "The replica must not serve") from cause
        return UpdateFigures(figures["blocked_s"], figures["load_s"], int(figures["recomputed_tokens"]))

    def _diagnosed(self, cause: Exception) -> tuple[WeightlaneError, bool]:
        """The typed error of a failed update, or of another action, and whether the old weights are in place on every rank."""
        if isinstance(cause, WeightlaneError):  # this process's own, which does not know
            return cause, False
        if isinstance(error := self.typed(cause), WorkerDiedError):
            return error, False
        failure = failure_from_text(str(cause), part=self.name)
        return failure.error, failure.intact

    async def sleep(self) -> None:
        """Free weights and caches by vLLM's deep sleep; on a CPU see `weightlane.rollout.vllm_cpu.sleep`."""
        await self._within_limit(self.running.sleep(DEEP), "fall asleep")

    async def wake(self, part: SleepPart) -> None:
        """Take back the memory of the weights, or of the caches."""
        tag = {"weights": WEIGHTS, "caches": CACHES}[part]
        await self._within_limit(self.running.wake_up([tag]), f"wake its {part}")

    async def memory_use(self) -> Sequence[MemoryUse]:
        """The memory of every rank."""
        return [
            MemoryUse(*each)
            for each in await self._within_limit(self.running.collective_rpc(MEMORY_USE), "tell its memory")
        ]

    async def _within_limit(self, call: Awaitable[T], action: str) -> T:
        """The result of a call about memory. After a failure it is not known which memory is there: `QuarantinedError`."""
        try:
            async with limited(self.config.commit_timeout_s, self.late(f"the engine did not {action}")):
                return await call
        except Exception as cause:
            error, _ = self._diagnosed(cause)
            if isinstance(error, WorkerDiedError):
                raise error from cause
            raise QuarantinedError(
                f"the engine did not {action}: {type(error).__name__}: {error.message}",
                part=self.name,
                hint="It is not known which memory is there; the replica must not serve.",
            ) from cause

    async def abort(self, keys: Collection[str]) -> None:
        """End requests. Never raises: an engine too broken to abort requests ends them by dying."""
        with suppress(Exception):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._engine.abort(list(keys))

    async def close(self) -> None:
        """End the engine and its processes. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        # A dead or hung engine cannot leave its publisher, but the shutdown below still ends its processes.
        with suppress(Exception):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await engine.shutdown_weight_transfer_engine()
        if engine.output_handler is not None:
            engine.output_handler.cancel()  # It would take the processes' end for a crash, and log it as one.
        await on_thread(self._end_processes, engine)
        del engine
        await asyncio.sleep(0)  # Lets the engine's cancelled tasks end and drop it.
        gc.unfreeze()
        gc.collect()  # The engine is part of reference cycles; its finalizer fails noisily at the interpreter's end.

    def typed(self, cause: BaseException) -> WeightlaneError:
        """An exception of vLLM's as a `WeightlaneError`."""
        from vllm.exceptions import VLLMClientError  # noqa: PLC0415 - slow to import
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

        if isinstance(cause, WeightlaneError):
            return cause
        if isinstance(cause, (VLLMClientError, ValueError)):
            return ConfigError(f"vLLM refused the request: {cause}.", part=self.name)
        if isinstance(cause, EngineDeadError) or self.dead:
            return self.died()
        return failure_from_text(f"{type(cause).__name__}: {cause}", part=self.name).error

    def died(self) -> WorkerDiedError:
        """The error that says that the engine's processes have died."""
        return WorkerDiedError(
            "the engine's processes are gone.", part=self.name, peer=self.name, hint="Its log has the cause."
        )

    def _build(self, given_up: threading.Event) -> None:
        """Make vLLM's engine, on a thread. It ends at once if `start` was `given_up` meanwhile: nobody else knows of it then."""
        with self._building:
            if given_up.is_set():
                return
            self._make_engine()
            if given_up.is_set() and (engine := self._engine) is not None:
                self._engine = None
                self._end_processes(engine)

    def _end_processes(self, engine: Any) -> None:
        engine.shutdown(timeout=_CLOSE_TIMEOUT_S)
        for process in self._processes:
            process.join(_CLOSE_TIMEOUT_S)  # vLLM kills those that take longer, and does not reap them
        self._processes = ()
        if self._cleaner is not None:
            self._cleaner.close()

    def _make_engine(self) -> None:
        arguments, vllm_config = replica_config(self.config, self.model_dir)
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415 - after the environment that it reads

        self.dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self.vocab_size = int(vllm_config.model_config.get_vocab_size())
        from .start_failures import take_failure  # noqa: PLC0415 - imports vLLM

        self._cleaner = Cleaner()
        self._cleaner.watch()
        # Not returned: something in vLLM keeps this thread's frames, and the result with them, from being freed.
        try:
            self._engine = AsyncLLM.from_vllm_config(
                vllm_config,
                enable_log_requests=arguments.enable_log_requests,
                disable_log_stats=arguments.disable_log_stats,
            )
        except BaseException as cause:
            self._cleaner.close()
            failure = take_failure(vllm_config)  # also after an interrupt: it removes the file
            if failure is not None and isinstance(cause, Exception):
                raise failure from cause
            raise
        self._processes = self._engine.engine_core.resources.engine_manager.processes
        self._cleaner.settle(segments_of_trees(process.pid for process in self._processes))
