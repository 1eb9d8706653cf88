"""`RolloutWorker`: one vLLM engine that generates without a break and takes over new weights between two decode steps."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from weightlane.ckpt_engines import (
    ClosedError,
    CommitError,
    ConfigError,
    DeadlineExceededError,
    QuarantinedError,
    WeightlaneError,
    WorkerDiedError,
    as_weightlane_error,
)
from weightlane.plugins import process_hooks

from ..commit.commit import CommitFailure, commit_version, roll_back
from ..commit.records import CommitReport, Completion, RolloutStats
from ..commit.token_clock import TokenClock
from ..commit.wire import failure_from_text
from ..config import RolloutConfig
from ..layout.loading.topology import in_short, refuse_division, why_not
from ..vllm.environment import engine_arguments, prepare_environment
from ..vllm.shared_memory import segments_of_trees
from .shared_memory_cleaner import SharedMemoryCleaner

_CLOSE_TIMEOUT_S = 10.0
_WATCH_S = 0.5
_GAP_WAIT_S = 0.5
"""How long observers of a commit wait for the next token of each request in flight."""


class RolloutWorker:
    """Owns one replica's engine. All methods run on one event loop.

    Args:
        name: The replica's name; its ranks are ``<name>/<rank>``.
        config: How to run it.
        model_dir: Hugging Face checkpoint directory that the replica starts from.
        initial_version: Weight version of that checkpoint.
    """

    def __init__(
        self, name: str, config: RolloutConfig, model_dir: str | os.PathLike[str], initial_version: int = 0
    ) -> None:
        self.name = name
        self.config = config
        self.version = initial_version
        self.clock = TokenClock()
        self.exchanges = 0
        self.dtype = ""
        """What it computes in; known once it has started."""
        self.max_model_len = 0
        """Most tokens of a prompt and its completion together; known once it has started."""
        self._model_dir = Path(model_dir)
        self._engine: Any = None
        self._control = asyncio.Lock()
        self._broken: WeightlaneError | None = None
        """Why no requests are taken; None while they are."""
        self._stops = 0
        """How often the replica was taken out of service."""
        self._before: int | None = None
        """What served before `version`; None when that cannot be gone back to."""
        self._in_flight: dict[str, str] = {}
        self._serial = itertools.count()
        self._requests = 0
        self._commits = 0
        self._blocked_s = 0.0
        self._tellings: set[asyncio.Task[None]] = set()
        """Commits of which observers are still to be told."""
        self._janitor: SharedMemoryCleaner | None = None
        self._hooks = process_hooks()

    def subscriber_names(self) -> list[str]:
        """Under which names its ranks subscribe."""
        return [f"{self.name}/{rank}" for rank in range(self.config.tensor_parallel)]

    async def start(self) -> None:
        """Load the model and start serving.

        Raises:
            ConfigError: vLLM refuses the model or an argument.
            WorkerDiedError: The engine's processes ended while starting.
            DeadlineExceededError: It took longer than `RolloutConfig.start_timeout_s`.
        """
        if not self._model_dir.is_dir():
            raise ConfigError(f"model directory {self._model_dir} does not exist.", part=self.name)
        try:
            async with asyncio.timeout(self.config.start_limit_s):
                await asyncio.to_thread(self._build_engine)
                await self._engine.update_weight_version(str(self.version))
            _freeze_heap()
        except WeightlaneError:
            raise
        except TimeoutError as cause:
            raise DeadlineExceededError(
                f"the engine did not start within {self.config.start_limit_s:.0f} s.",
                part=self.name,
                hint="Raise rollout.start_timeout_s.",
            ) from cause
        except (ValueError, TypeError, OSError) as cause:
            raise ConfigError(
                f"vLLM cannot start from {self._model_dir}: {in_short(cause)}", part=self.name, hint=why_not(cause)
            ) from cause
        except Exception as cause:
            raise WorkerDiedError(
                f"the engine ended while starting: {cause}.", part=self.name, hint="The replica's log has the cause."
            ) from cause

    async def connect(
        self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any] | None = None
    ) -> None:
        """Subscribe every rank to the publisher at `rendezvous`, leaving the one it was subscribed to before.

        Raises:
            QuarantinedError: The weights were damaged, and no requests are taken until a version has been committed.
            WeightlaneError: The first rank's typed error; no rank is subscribed then.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest  # noqa: PLC0415 - slow to import

        info = {
            "rendezvous": dict(rendezvous),
            "replica": self.name,
            "backend": backend,
            "options": dict(options or {}),
            "commit": self.config.commit,
            **({} if (limit := self.config.staging_limit_bytes) is None else {"staging_limit_bytes": limit}),
        }
        async with self._control:
            engine = self._running()
            try:
                async with asyncio.timeout(self.config.connect_timeout_s):
                    await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
            except TimeoutError as cause:
                raise DeadlineExceededError(
                    f"not connected within {self.config.connect_timeout_s:.0f} s.", part=self.name
                ) from cause
            except Exception as cause:
                error = self.typed(cause)
                if isinstance(error, QuarantinedError):
                    await self._stop_serving(error)
                raise error from cause

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        stop_ids: Sequence[int] = (),
        seed: int | None = None,
        greedy: bool = False,
    ) -> Completion:
        """Generate a completion; versions may be committed while it runs.

        Args:
            request_id: For logs and the answer; need not be unique.
            prompt_ids: Token ids of the prompt, at least one.
            max_new_tokens: Most tokens to generate.
            temperature: Sampling temperature, above 0; log-probabilities are of the distribution at that temperature.
            stop_ids: Token ids that end the completion. Nothing else does, not even the model's own end-of-sequence token.
            seed: Makes the sampling repeatable for fixed weights.
            greedy: Take the most probable token; log-probabilities are then those at temperature 1.

        Raises:
            QuarantinedError: The replica was taken out of service, before or during the request. It carries the reason.
            WorkerDiedError: The engine is gone.
            DeadlineExceededError: It took longer than `RolloutConfig.request_timeout_s`.
            ConfigError: vLLM refuses the request, for example because the prompt is too long.
        """
        engine = self._running()
        self._refuse_if_broken()
        key = f"{request_id}#{next(self._serial)}"
        began, stops = time.perf_counter(), self._stops
        self._in_flight[key] = request_id
        self.clock.begin(key)
        try:
            params = _sampling_params(
                temperature=0.0 if greedy else temperature,
                max_tokens=max_new_tokens,
                stop_token_ids=list(stop_ids),
                seed=seed,
            )
            async with asyncio.timeout(self.config.request_timeout_s):
                completion = await self._stream(engine, key, self._prompt(prompt_ids), params, stops)
        except WeightlaneError:
            raise  # Some of ours are TimeoutErrors too.
        except TimeoutError as cause:
            raise DeadlineExceededError(
                f"request {request_id} took longer than {self.config.request_timeout_s:.0f} s.", part=self.name
            ) from cause
        except Exception as cause:
            raise self.typed(cause) from cause
        finally:
            self._in_flight.pop(key, None)
            self.clock.end(key)
        self._requests += 1
        self._hooks.generation_finished(
            facts={
                "replica": self.name,
                "request": request_id,
                "tokens": len(completion.token_ids),
                "prompt_tokens": len(prompt_ids),
                "seconds": time.perf_counter() - began,
                "version_min": min(completion.versions, default=self.version),
                "version_max": max(completion.versions, default=self.version),
                "finish_reason": completion.finish_reason,
            }
        )
        return completion

    async def generate_group(
        self,
        prompt_ids: Sequence[int],
        *,
        count: int,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        greedy: bool = False,
    ) -> list[Completion | WeightlaneError]:
        """`count` completions of one prompt, generated at the same time.

        One that takes too long, or that vLLM refuses, is an error in this list; raises what `generate` raises of the replica.
        """

        async def one() -> Completion | WeightlaneError:
            try:
                return await self.generate(
                    f"group-{next(self._serial)}",
                    prompt_ids,
                    max_new_tokens,
                    temperature=temperature,
                    stop_ids=stop_token_ids,
                    greedy=greedy,
                )
            except (DeadlineExceededError, ConfigError) as error:
                return error

        async with asyncio.TaskGroup() as generating:
            tasks = [generating.create_task(one()) for _ in range(count)]
        return [task.result() for task in tasks]

    async def commit(self, version: int) -> CommitReport:
        """Put `version`, which every rank has staged, into service between two decode steps.

        Requests in flight stay; `RolloutConfig.kv_on_commit` says what becomes of their caches.

        A version that cannot be loaded is undone at once, where the one before is kept.

        Raises:
            WorkerDiedError: The engine is gone.
            QuarantinedError: The weights cannot be trusted. Requests in flight end with that error and new ones are refused
                with it until a version has been committed; `stats().serving` tells.
            UntouchedError: Any other reason: the old version is in place on every rank, bit for bit, and serves on.
        """
        async with self._control:
            engine = self._running()
            began, stops, before = time.perf_counter(), self._stops, self._sound_version()
            async with self._stopping_on_failure(f"the commit of version {version}"):
                report = await commit_version(self, engine, version, sound=before is not None)
            if stops == self._stops:  # A quarantine that came meanwhile outlives this commit.
                self._broken = None
            self._before, self.version = before, version
            self._commits += 1
            self._blocked_s += report.blocked_s
            telling = asyncio.create_task(self._tell(report, began))
            self._tellings.add(telling)
            telling.add_done_callback(self._tellings.discard)
            return report

    async def _tell(self, report: CommitReport, began: float) -> None:
        """Tell observers of a commit once requests in flight have gone on, which nobody else waits for."""
        gap_s = await self.clock.gap_s(report.version, _GAP_WAIT_S)
        self._hooks.replica_committed(
            replica=self.name,
            version=report.version,
            facts={
                "waited_s": report.waited_s,
                "blocked_s": report.blocked_s,
                "load_s": report.load_s,
                "in_flight": report.in_flight,
                "max_token_gap_s": gap_s,
                "seconds": time.perf_counter() - began,
            },
        )

    async def rollback(self, version: int) -> None:
        """Serve what was served before `version` again, on every rank from the same step on. Nothing to do if it does.

        Raises:
            CommitError: It is not kept; `version` serves on.
            WeightlaneError: What `commit` raises.
        """
        async with self._control:
            engine = self._running()
            if self._broken is None and self.version < version:
                return
            self._refuse_if_broken()
            if self.version > version or self._before is None:
                raise CommitError(f"version {version} cannot be taken back.", part=self.name)
            async with self._stopping_on_failure(f"the rollback of version {version}"):
                self._blocked_s += await roll_back(self, engine, version, self._before)
            self.version, self._before = self._before, None

    async def quarantine(self, error: WeightlaneError) -> None:
        """Take no requests until the next commit, and end those in flight. They are told `error`."""
        await self._stop_serving(
            error
            if isinstance(error, QuarantinedError)
            else QuarantinedError(
                f"the replica is out of service: {type(error).__name__}: {error}", part=self.name, peer=error.peer
            )
        )

    async def watch(self) -> NoReturn:
        """Raise `WorkerDiedError` when the engine's processes die: vLLM leaves calls other than requests unanswered then."""
        while self._engine is None or not self._engine.errored:  # noqa: ASYNC110 - vLLM announces it to requests only
            await asyncio.sleep(_WATCH_S)
        raise self._dead()

    def stats(self) -> RolloutStats:
        """Running totals."""
        return RolloutStats(
            version=self.version,
            serving=self._engine is not None and self._broken is None,
            requests=self._requests,
            tokens=self.clock.tokens,
            in_flight=self.clock.in_flight,
            commits=self._commits,
            busy_s=self.clock.busy_s,
            blocked_s=self._blocked_s,
            max_token_gap_s=max(self.clock.gaps_s.values(), default=0.0),
            commit_gaps_s=dict(self.clock.gaps_s),
        )

    async def close(self) -> None:
        """End the engine and its processes. Requests in flight end with an error. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        await asyncio.gather(*self._tellings, return_exceptions=True)
        # A dead or hung engine cannot leave its publisher; the shutdown below ends its processes all the same.
        with suppress(Exception):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await engine.abort(list(self._in_flight))
                await engine.shutdown_weight_transfer_engine()
        if engine.output_handler is not None:
            engine.output_handler.cancel()  # It would take the processes' end for a crash, and log it as one.
        await asyncio.to_thread(engine.shutdown, timeout=_CLOSE_TIMEOUT_S)
        if self._janitor is not None:
            await asyncio.to_thread(self._janitor.close)
        del engine
        await asyncio.sleep(0)  # Lets the engine's cancelled tasks end and drop it.
        gc.unfreeze()
        gc.collect()  # The engine is part of reference cycles; left to the interpreter's end its finalizer fails noisily.

    def typed(self, cause: BaseException) -> WeightlaneError:
        """What vLLM raised, as one of our errors."""
        from vllm.exceptions import VLLMClientError  # noqa: PLC0415 - slow to import
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

        if isinstance(cause, WeightlaneError):
            return cause
        if isinstance(cause, (VLLMClientError, ValueError)):
            return ConfigError(f"vLLM refused the request: {cause}.", part=self.name)
        if isinstance(cause, EngineDeadError) or (self._engine is not None and self._engine.errored):
            return self._dead()
        return failure_from_text(f"{type(cause).__name__}: {cause}", part=self.name).error

    def _build_engine(self) -> None:
        on_cpu = prepare_environment(self.config)
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - after the environment
        from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        arguments = engine_arguments(self.config, self._model_dir, on_cpu=on_cpu)
        asked = AsyncEngineArgs(**arguments)
        vllm_config = asked.create_engine_config(UsageContext.ENGINE_CONTEXT)
        refuse_division(vllm_config, part=self.name)
        self.dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        # Not returned: something in vLLM keeps this thread's frames, and with them the result, from being freed.
        self._engine = AsyncLLM.from_vllm_config(
            vllm_config, enable_log_requests=asked.enable_log_requests, disable_log_stats=asked.disable_log_stats
        )
        processes = self._engine.engine_core.resources.engine_manager.processes
        self._janitor = SharedMemoryCleaner(segments_of_trees(process.pid for process in processes))

    def _dead(self) -> WorkerDiedError:
        return WorkerDiedError(
            "the engine's processes are gone.", part=self.name, peer=self.name, hint="Its log has the cause."
        )

    def _running(self) -> Any:
        if self._engine is None:
            raise ClosedError("the replica is not running.", part=self.name)
        return self._engine

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise type(self._broken)(
                self._broken.message,
                part=self.name,
                peer=self._broken.peer,
                hint="It serves again after the next commit.",
            )

    def _sound_version(self) -> int | None:
        """The version that serves; None when nothing may."""
        return self.version if self._broken is None else None

    @asynccontextmanager
    async def _stopping_on_failure(self, what: str) -> AsyncIterator[None]:
        """Raise the typed error of a failed exchange of weights, and stop serving if they cannot be trusted."""
        try:
            yield
        except CommitFailure as failure:
            if not failure.serving:
                await self._stop_serving(failure.error)
            raise failure.error from failure.__cause__
        except asyncio.CancelledError:
            await self._stop_serving(QuarantinedError(f"{what} was cancelled.", part=self.name))
            raise

    async def _stop_serving(self, error: WeightlaneError) -> None:
        self._broken = error
        self._stops += 1
        with suppress(Exception):  # An engine too broken to abort requests ends them by dying.
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._engine.abort(list(self._in_flight))

    def _prompt(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
        if self.config.kv_on_commit == "keep":
            # The prefix cache cannot be emptied while requests use it. Salted with the weights a request began under, a
            # block is found only by requests that began under the same ones. A version is not salt enough: after a rollback
            # it serves again, but requests that began under it went on under the other one meanwhile.
            prompt["cache_salt"] = f"weightlane-{self.exchanges}"
        return prompt

    async def _stream(self, engine: Any, key: str, prompt: dict[str, Any], params: Any, stops: int) -> Completion:
        token_ids: list[int] = []
        logprobs: list[float] = []
        last: Any = None
        async for output in engine.generate(prompt, params, request_id=key):
            (last,) = output.outputs
            if last.token_ids:
                self.clock.arrived(key, len(last.token_ids))
                token_ids += last.token_ids
                logprobs += [ranked[token].logprob for token, ranked in zip(last.token_ids, last.logprobs, strict=True)]
        if stops != self._stops:
            self._refuse_if_broken()
            raise QuarantinedError("the replica was out of service during the request.", part=self.name)
        if last is None or last.finish_reason not in ("stop", "length"):
            reason = "nothing" if last is None else last.finish_reason
            raise ClosedError(f"request {self._in_flight[key]} ended early ({reason}).", part=self.name)
        versions = [int(span.version) for span in last.weight_versions or () for _ in range(span.start, span.end)]
        if not len(token_ids) == len(logprobs) == len(versions):
            raise as_weightlane_error(
                AssertionError(f"{len(token_ids)} tokens, {len(logprobs)} logprobs, {len(versions)} versions"),
                self.name,
            )
        return Completion(self._in_flight[key], token_ids, logprobs, versions, last.finish_reason)


def _sampling_params(**wanted: Any) -> Any:
    from vllm import SamplingParams  # noqa: PLC0415 - slow to import
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    return SamplingParams(
        **wanted,
        ignore_eos=True,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _freeze_heap() -> None:
    """Take what start-up made out of garbage collection: going through all of it stops the event loop for 0.3 s at a time."""
    gc.collect()
    gc.freeze()
