"""`RolloutWorker`: one vLLM engine that generates without a break and takes over new weights between two decode steps."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from weightlane.ckpt_engines import (
    CommitError,
    ConfigError,
    DeadlineExceededError,
    QuarantinedError,
    WeightlaneError,
)
from weightlane.plugins import process_hooks

from ..commit.commit import CommitFailure, commit_version, roll_back
from ..commit.records import CommitReport, Completion, RolloutStats
from ..commit.token_clock import TokenClock
from ..config import RolloutConfig
from .adapter_versions import AdapterVersion, AdapterVersions
from .generation import generate, sampling_params
from .vllm_engine import VllmEngine

_WATCH_S = 0.5
"""Seconds between two looks at whether the engine has died: short beside the time that a dead replica costs anyway."""
_GAP_WAIT_S = 0.5
"""Most seconds that the report of a commit waits for the next token of each request in flight."""


class RolloutWorker:
    """One replica with its engine. All methods run on one event loop.

    Args:
        name: The replica's name; its ranks are ``<name>/<rank>``.
        config: Options of the replica.
        model_dir: Hugging Face checkpoint directory that the replica starts from.
        initial_version: Weight version of that checkpoint.
    """

    def __init__(
        self, name: str, config: RolloutConfig, model_dir: str | os.PathLike[str], initial_version: int = 0
    ) -> None:
        self.name = name
        self.config = config
        self.version = initial_version
        self._engine = VllmEngine(name, config, model_dir)
        self.clock = TokenClock()
        self._control = asyncio.Lock()
        """Held by the one connect, commit or rollback that runs."""
        self._updates = 0
        """Number of times that the weights were about to change."""
        self._broken: WeightlaneError | None = None
        """The reason why no requests are accepted; None while they are."""
        self._stops = 0
        """Number of times that the replica was taken out of service."""
        self._before: int | None = None
        """The version before `version`; None if it cannot be restored."""
        self._adapters = None if config.adapter is None else AdapterVersions(name)
        """None where versions are weights."""
        self._in_flight: dict[str, int] = {}
        """vLLM's id of the adapter that each request computes with, by the request's key; 0 for none."""
        self._serial = itertools.count()
        self._requests = 0
        self._commits = 0
        self._blocked_s = 0.0
        self._reports: set[asyncio.Task[None]] = set()
        """Reports of commits to observers, which wait for tokens."""
        self._hooks = process_hooks()

    @property
    def dtype(self) -> str:
        """The dtype that the replica computes in; known once it has started."""
        return self._engine.dtype

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its completion together; known once the replica has started."""
        return self._engine.max_model_len

    def subscriber_names(self) -> list[str]:
        """The names under which the replica's ranks subscribe."""
        return [f"{self.name}/{rank}" for rank in range(self.config.tensor_parallel)]

    async def start(self) -> None:
        """Load the model and start serving.

        Raises:
            ConfigError: vLLM refuses the model or an argument.
            WorkerDiedError: The engine's processes ended while starting.
            DeadlineExceededError: The start took longer than `RolloutConfig.start_timeout_s`.
        """
        await self._engine.start(self.version)

    async def connect(
        self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any] | None = None
    ) -> None:
        """Subscribe every rank to the publisher at `rendezvous`, and leave the publisher before.

        Raises:
            QuarantinedError: The weights were damaged, and no requests are accepted until a version has been committed.
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
            **({} if (adapter := self.config.adapter) is None else {"adapter": adapter.model_dump()}),
        }
        async with self._control:
            engine = self._engine.running
            try:
                async with asyncio.timeout(self.config.connect_timeout_s):
                    await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
            except TimeoutError as cause:
                raise DeadlineExceededError(
                    f"not connected within {self.config.connect_timeout_s:.0f} s.", part=self.name
                ) from cause
            except Exception as cause:
                error = self._engine.typed(cause)
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
        """Generate a completion; versions may be committed while it runs. An adapter stays the one that it began with.

        Args:
            request_id: Name of the request in logs and in the answer; need not be unique.
            prompt_ids: Token ids of the prompt, at least one.
            max_new_tokens: Most tokens to generate.
            temperature: Sampling temperature, above 0; log-probabilities are of the distribution at that temperature.
            stop_ids: Token ids that end the completion. Nothing else does, not even the model's own end-of-sequence token.
            seed: Makes the sampling repeatable for fixed weights.
            greedy: Take the most probable token; log-probabilities are then those at temperature 1.

        Raises:
            QuarantinedError: The replica was taken out of service, before or during the request, or versions are adapters and
                none has been committed; the text has the reason.
            WorkerDiedError: The engine is gone.
            DeadlineExceededError: The request took longer than `RolloutConfig.request_timeout_s`.
            ConfigError: vLLM refuses the request, for example because the prompt is too long.
        """
        engine = self._engine.running
        self._refuse_if_broken()
        adapter = None if self._adapters is None else self._adapters.current()
        key = f"{request_id}#{next(self._serial)}"
        began, stops = time.perf_counter(), self._stops
        self._in_flight[key] = 0 if adapter is None else adapter.id
        self.clock.begin(key)
        try:
            params = sampling_params(
                temperature=0.0 if greedy else temperature,
                max_tokens=max_new_tokens,
                stop_token_ids=stop_ids,
                seed=seed,
            )
            async with asyncio.timeout(self.config.request_timeout_s):
                salt = self._cache_salt()
                generated = await generate(
                    engine, key, prompt_ids, params, cache_salt=salt, clock=self.clock, adapter=adapter
                )
            self._refuse_if_stopped(stops)
            completion = generated.completion(request_id, self.name)
        except WeightlaneError:
            raise  # Some `WeightlaneError`s are `TimeoutError`s.
        except TimeoutError as cause:
            raise DeadlineExceededError(
                f"request {request_id} took longer than {self.config.request_timeout_s:.0f} s.", part=self.name
            ) from cause
        except Exception as cause:
            raise self._engine.typed(cause) from cause
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
        """Generate `count` completions of one prompt at the same time; raises as `generate` if the replica fails.

        A request that takes too long, or that vLLM refuses, is an error in the list.
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

        Requests in flight continue; `RolloutConfig.kv_on_commit` says what happens to their caches. A version that cannot be
        loaded is rolled back at once if the version before is kept.

        Raises:
            WorkerDiedError: The engine is gone.
            QuarantinedError: The weights cannot be trusted. Requests in flight fail with this error, and so do new ones until
                a version has been committed; see `stats().serving`.
            UntouchedError: Any other reason: the old version is in place on every rank, bit for bit, and serves on.
        """
        async with self._control:
            began, stops, before = time.perf_counter(), self._stops, None if self._broken is not None else self.version
            adapters, sound = self._adapters, before is not None
            made = None if adapters is None else adapters.next(version)
            async with self._updating(f"the commit of version {version}"):
                more = self._adapter_fields(made)
                report = await commit_version(self._engine, self.config, self.clock, version, sound=sound, more=more)
            if adapters is not None and made is not None:
                adapters.committed(made)
            if stops == self._stops:  # Otherwise a quarantine came during the commit, and outlives it.
                self._broken = None
            self._before, self.version = before, version
            self._commits += 1
            self._blocked_s += report.blocked_s
            reporting = asyncio.create_task(self._report(report, began))
            self._reports.add(reporting)
            reporting.add_done_callback(self._reports.discard)
            return report

    async def rollback(self, version: int) -> None:
        """Serve the version before `version` again, on every rank from the same step on. Does nothing if it serves already.

        Raises:
            CommitError: The version before is not kept; `version` serves on.
            WeightlaneError: As `commit`.
        """
        async with self._control:
            _ = self._engine.running  # Raises if the engine is closed.
            if self._broken is None and self.version < version:
                return
            self._refuse_if_broken()
            if self.version > version or self._before is None:
                raise CommitError(f"version {version} cannot be rolled back.", part=self.name)
            more = self._adapter_fields(None if self._adapters is None else self._adapters.previous(version))
            async with self._updating(f"the rollback of version {version}"):
                self._blocked_s += await roll_back(self._engine, self.config, version, self._before, more)
            if self._adapters is not None:
                self._adapters.rolled_back()
            self.version, self._before = self._before, None

    async def quarantine(self, error: WeightlaneError) -> None:
        """Refuse requests until the next commit, and let those in flight fail with `error`."""
        await self._stop_serving(
            error
            if isinstance(error, QuarantinedError)
            else QuarantinedError(
                f"the replica is out of service: {type(error).__name__}: {error}", part=self.name, peer=error.peer
            )
        )

    async def watch(self) -> NoReturn:
        """Raise `WorkerDiedError` when the engine's processes die: vLLM then answers nothing but requests."""
        while not self._engine.dead:  # noqa: ASYNC110 - vLLM tells requests only
            await asyncio.sleep(_WATCH_S)
        raise self._engine.died()

    def stats(self) -> RolloutStats:
        """Running totals."""
        return RolloutStats(
            version=self.version,
            serving=self._engine.open and self._broken is None and (self._adapters is None or self._adapters.any),
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
        """End the engine and its processes. Requests in flight fail. Idempotent."""
        if self._engine.open:
            await asyncio.gather(*self._reports, return_exceptions=True)
            await self._engine.close(self._in_flight)

    async def _report(self, report: CommitReport, began: float) -> None:
        """Tell observers of a commit, once requests in flight have tokens again; nobody waits for that."""
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

    @asynccontextmanager
    async def _updating(self, action: str) -> AsyncIterator[None]:
        """Raise the typed error of a failed update of the weights, and stop serving if they cannot be trusted."""
        _ = self._engine.running  # Raises if the engine is closed.
        self._updates += 1
        try:
            yield
        except CommitFailure as failure:
            if not failure.serving:
                await self._stop_serving(failure.error)
            raise failure.error from failure.__cause__
        except asyncio.CancelledError:
            await self._stop_serving(QuarantinedError(f"{action} was cancelled.", part=self.name))
            raise

    async def _stop_serving(self, error: WeightlaneError) -> None:
        self._broken = error
        self._stops += 1
        await self._engine.abort(self._in_flight)

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise type(self._broken)(
                self._broken.message,
                part=self.name,
                peer=self._broken.peer,
                hint="It serves again after the next commit.",
            )

    def _refuse_if_stopped(self, stops: int) -> None:
        """Raise if the replica was taken out of service since `stops` was counted."""
        if stops != self._stops:
            self._refuse_if_broken()
            raise QuarantinedError("the replica was out of service during the request.", part=self.name)

    def _adapter_fields(self, serving: AdapterVersion | None) -> dict[str, Any]:
        """The fields of an update after which `serving` serves; none where versions are weights."""
        if self._adapters is None or serving is None:
            return {}
        return self._adapters.fields(serving, (used for used in self._in_flight.values() if used))

    def _cache_salt(self) -> str:
        """The salt of a request that begins now, if the prefix cache cannot be emptied because requests use it.

        A block is then found only by requests that began under the same weights. The version is no salt: after a rollback it
        serves again, but requests that began under it have continued under the other version.
        """
        keeps = self.config.kv_on_commit == "keep" and self._adapters is None
        return f"weightlane-{self._updates}" if keeps else ""
