"""`LocalReplica`: one rollout engine that generates without a break and takes over new weights between two decode steps."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from weightlane.ckpt_engines import (
    ClosedError,
    CommitError,
    ConfigError,
    DeadlineExceededError,
    QuarantinedError,
    UntouchedError,
    WeightlaneError,
)
from weightlane.ckpt_engines.runtime.process_memory import MemoryUse
from weightlane.sync import CommitReport

from ..commit.token_clock import TokenClock
from ..config import AdapterConfig, RolloutConfig
from ..contract.engine import RolloutEngine, SleepPart
from ..contract.records import Completion, RolloutStats
from ..contract.registry import rollout_engine_class
from ..contract.requests import GenerationRequest, Sampling
from ..layout.loading.adapter_tensors import adapted_layers
from .adapter_versions import AdapterVersions
from .availability import Availability
from .replica_hooks import Observed

_WATCH_S = 0.5
"""Seconds between two looks at whether the engine has died: short compared with the time that a dead replica costs anyway."""


class LocalReplica:
    """One replica with its engine. All methods run on one event loop.

    Args:
        name: The replica's name; its ranks are ``<name>/<rank>``.
        config: Options of the replica.
        model_dir: Hugging Face checkpoint directory that the replica starts from.
        initial_version: Weight version of that checkpoint.
        engine: Class of an engine that is not registered; None for the one that `RolloutConfig.engine` names.

    Raises:
        ConfigError: There is no engine called `RolloutConfig.engine`, or it cannot do what `config` asks for.
    """

    def __init__(
        self,
        name: str,
        config: RolloutConfig,
        model_dir: str | os.PathLike[str],
        initial_version: int = 0,
        *,
        engine: type[RolloutEngine] | None = None,
    ) -> None:
        self.name = name
        self.version = initial_version
        self._engine = rollout_engine_class(config, engine)(name, config, model_dir)
        self.clock = TokenClock()
        self._control = asyncio.Lock()
        """Held by the one connect, commit or rollback that runs."""
        self._updates = 0
        """Number of times that the weights were about to change."""
        self._before: int | None = None
        """The version before `version`; None if it cannot be restored."""
        self._adapters = AdapterVersions(name, config.adapter, initial_version)
        self._in_flight: dict[str, int] = {}
        """The engine's id of the adapter that each request computes with, by the request's key; 0 for none."""
        self._available = Availability(name, self._engine, self._in_flight)
        self._serial = itertools.count()
        self._requests, self._commits, self._blocked_s = 0, 0, 0.0
        self._observed = Observed(name, self.clock)

    @property
    def config(self) -> RolloutConfig:
        """Options of the replica."""
        return self._engine.config

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
            ConfigError: The engine refuses the model or an argument.
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
        info = {
            "rendezvous": dict(rendezvous),
            "take_over": True,  # the engine is this object's own, and whoever calls it owns both
            "replica": self.name,
            "backend": backend,
            "options": dict(options or {}),
            "commit": self.config.commit,
            **({} if (limit := self.config.staging_limit_bytes) is None else {"staging_limit_bytes": limit}),
            **({} if (adapter := self.config.adapter) is None else {"adapter": adapter.model_dump()}),
        }
        async with self._control:
            try:
                await self._engine.connect(info)
            except QuarantinedError as error:
                await self._available.stop(error)
                raise

    async def announce(self, version: int, adapter: AdapterConfig, keep: Collection[int] = ()) -> None:
        """Declare which adapter `version` will be, before it is committed. Replaces an earlier announcement of it.

        The ranks then load its first `adapter.rank` rows of A and columns of B for its targets; a version that isn't announced
        is an adapter of `RolloutConfig.adapter`. Requests can name either in `generate` until a commit that does not keep it.

        Args:
            version: The version, above all that were committed.
            adapter: Its rank, at most that of `RolloutConfig.adapter`; its alpha; its targets, some of those that are sent;
                no targets mean all of these.
            keep: Versions that requests can still name after it was committed. Others are dropped, but for requests in flight.

        Raises:
            ConfigError: Versions are weights, none can be such an adapter, or this one has been committed.
        """
        layers: Collection[str] = ()
        if self.config.adapter is not None:
            layers = await asyncio.to_thread(adapted_layers, self._engine.model_dir, self.config.adapter)
        self._adapters.announce(version, adapter, keep, layers)

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        adapter: int | None = None,
        **options: Any,
    ) -> Completion:
        """Generate a completion; versions may be committed while it runs. An adapter stays the one that it began with.

        Args:
            request_id: Name of the request in logs and in the answer; need not be unique.
            prompt_ids: Token ids of the prompt, at least one.
            max_new_tokens: Most tokens to generate.
            adapter: The version of the adapter, where versions are adapters: an announced one that is loaded, or the newest;
                0 for the model's weights without an adapter, also before anything was committed; None for the newest.
            options: Fields of `Sampling`, such as ``temperature=0.7``.

        Raises:
            QuarantinedError: The replica was taken out of service, before or during the request, or versions are adapters, the
                newest is wanted and none has been committed; the text has the reason.
            WorkerDiedError: The engine is gone.
            DeadlineExceededError: The request took longer than `RolloutConfig.request_timeout_s`.
            ConfigError: The adapter is not loaded, or the engine refuses the request, for example because the prompt is too long.
        """
        self._available.refuse_if_unavailable()
        sampling = Sampling(max_new_tokens, **options)
        sampling.check(prompt_ids, self._engine.vocab_size, self.name)
        version = self._adapters.of_request(adapter)
        key = f"{request_id}#{next(self._serial)}"
        request = GenerationRequest(key, request_id, prompt_ids, sampling, self._cache_salt(), version)
        began, stops = time.perf_counter(), self._available.stops
        # At once: from here on a commit leaves the adapter loaded.
        self._in_flight[key] = 0 if version is None else version.id
        self.clock.begin(key)
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                completion = await self._engine.generate(request, lambda tokens: self.clock.arrived(key, tokens))
            self._available.refuse_if_stopped(stops)
        except WeightlaneError as error:  # Some of them are `TimeoutError`s.
            if isinstance(error, ClosedError):
                self._available.refuse_if_stopped(stops)
            raise
        except TimeoutError as cause:
            raise DeadlineExceededError(
                f"request {request_id} took longer than {self.config.request_timeout_s:.0f} s.",
                part=self.name,
                hint="Ask for fewer tokens at once, or raise rollout.request_timeout_s.",
            ) from cause
        finally:
            self._in_flight.pop(key, None)
            self.clock.end(key)
        self._requests += 1
        self._observed.generated(completion, len(prompt_ids), time.perf_counter() - began)
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

        try:
            async with asyncio.TaskGroup() as generating:
                tasks = [generating.create_task(one()) for _ in range(count)]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def commit(self, version: int) -> CommitReport:
        """Put `version`, which every rank has staged, into service between two decode steps.

        Requests in flight continue; `RolloutConfig.kv_on_commit` says what happens to their caches. A version that cannot be
        loaded is rolled back at once if the version before is still staged.

        Raises:
            WorkerDiedError: The engine is gone.
            QuarantinedError: The weights cannot be trusted. Requests in flight fail with this error, and so do new ones until
                a version has been committed; see `stats().serving`.
            UntouchedError: Any other reason: the old version is in place on every rank, bit for bit, and serves on.
        """
        async with self._control:
            began, available = time.perf_counter(), self._available
            stops, before = available.stops, None if available.broken is not None else self.version
            more: dict[str, Any] = {}
            async with self._updating(f"the commit of version {version}"):
                if self.config.adapter is not None:
                    made, more = self._adapters.begin(version, self._in_flight.values())
                report = await self._commit(version, trusted=before is not None, more=more)
                if self.config.adapter is not None:
                    self._adapters.committed(made)
            if stops == available.stops:  # Otherwise a quarantine came during the commit, and outlives it.
                available.broken = None
            self._before, self.version = before, version
            self._commits += 1
            self._blocked_s += report.blocked_s
            self._observed.committed(report, began)
            return report

    async def _commit(self, version: int, *, trusted: bool, more: Mapping[str, Any]) -> CommitReport:
        in_flight, began = self.clock.commit_begins(version), time.monotonic()
        figures = await self._engine.update({**more, "version": version}, serves=version, trusted=trusted)
        self.clock.commit_ends(version)
        waited_s = time.monotonic() - began - figures.blocked_s
        self.clock.recomputed_tokens += figures.recomputed_tokens
        return CommitReport(version, figures.blocked_s, figures.load_s, waited_s, in_flight, figures.recomputed_tokens)

    async def sleep(self) -> None:
        """Free the memory of weights and caches, once the requests in flight have ended. Does nothing if it is freed.

        New requests are refused from now on. The weights are lost: after `wake`, a version has to be committed.

        Raises:
            WorkerDiedError: The engine is gone.
            QuarantinedError: The engine could not free it, and it is not known which memory is there.
        """
        async with self._control:
            self._available.refuse_if_closed()
            self._updates, self._before = self._updates + 1, None
            await self._available.sleep()

    async def wake(self, part: SleepPart) -> None:
        """Take back the memory of the weights or, later, of the caches. Does nothing if it is there. Raises as `sleep`.

        Requests are accepted once the weights have memory, a version was committed into them, and the caches have memory.
        """
        async with self._control:
            self._available.refuse_if_closed()
            await self._available.wake(part)

    async def memory_use(self) -> Sequence[MemoryUse]:
        """The memory of each rank: see `RolloutEngine.memory_use`."""
        return await self._engine.memory_use()

    async def rollback(self, version: int) -> None:
        """Serve the version before `version` again, on every rank from the same step on. Does nothing if it serves already.

        Raises:
            CommitError: The version before is no longer available; `version` serves on.
            WeightlaneError: As `commit`.
        """
        async with self._control:
            self._available.refuse_if_closed()
            if self._available.broken is None and self.version < version:
                return
            if self._available.broken is not None:
                self._available.refuse_if_unavailable()
            if self.version > version or self._before is None:
                raise CommitError(f"version {version} cannot be rolled back.", part=self.name)
            adapted = self.config.adapter is not None
            more = self._adapters.begin_rollback(version, self._in_flight.values()) if adapted else {}
            async with self._updating(f"the rollback of version {version}"):
                fields = {**more, "rollback_of": version}
                figures = await self._engine.update(fields, serves=self._before, trusted=True)
                self._blocked_s += figures.blocked_s
            self._adapters.rolled_back()
            self.version, self._before = self._before, None

    async def quarantine(self, error: WeightlaneError) -> None:
        """Refuse requests until the next commit, and let those in flight fail with `error`."""
        await self._available.stop(
            error
            if isinstance(error, QuarantinedError)
            else QuarantinedError(
                f"the replica is out of service: {type(error).__name__}: {error}", part=self.name, peer=error.peer
            )
        )

    async def watch(self) -> NoReturn:
        """Raise `WorkerDiedError` when the engine's processes die: it then answers nothing but requests."""
        while not self._engine.dead:  # noqa: ASYNC110 - engines tell requests only
            await asyncio.sleep(_WATCH_S)
        raise self._engine.died()

    def stats(self) -> RolloutStats:
        """Running totals."""
        return RolloutStats(
            version=self.version,
            serving=self._available.accepts and self._adapters.ready,
            requests=self._requests,
            tokens=self.clock.tokens,
            in_flight=self.clock.in_flight,
            commits=self._commits,
            busy_s=self.clock.busy_s,
            blocked_s=self._blocked_s,
            recomputed_tokens=self.clock.recomputed_tokens,
            max_token_gap_s=self.clock.max_gap_s,
            commit_gaps_s=dict(self.clock.gaps_s),
        )

    async def close(self) -> None:
        """End the engine and its processes. Requests in flight fail. Idempotent."""
        if self._engine.open:
            await self._observed.drained()
            await self._engine.abort(self._in_flight)
            await self._engine.close()

    @asynccontextmanager
    async def _updating(self, action: str) -> AsyncIterator[None]:
        """Stop serving if an update of the weights fails and they cannot be trusted."""
        self._available.refuse_if_closed()
        self._updates += 1
        try:
            yield
        except UntouchedError:
            self._adapters.untouched()
            raise
        except WeightlaneError as error:
            await self._available.stop(error)
            raise
        except asyncio.CancelledError:
            await self._available.stop(QuarantinedError(f"{action} was cancelled.", part=self.name))
            raise

    def _cache_salt(self) -> str:
        """The salt of a request that begins now, if the prefix cache cannot be emptied because requests use it.

        A block is then found only by requests that began under the same weights. The version is no salt: after a rollback it
        serves again, but requests that began under it have continued under the other version.
        """
        keeps = self.config.kv_on_commit == "keep" and self.config.adapter is None
        return f"weightlane-{self._updates}" if keeps else ""
