"""`TrainingScheduler`: the queue of the training requests of all clients."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from weightlane.ckpt_engines import ConfigError, DeadlineExceededError, ProtocolError, StorageError, WorkerDiedError

from ...config import LoraConfig
from ...runner.job_joiner import JobJoiner, RunJob
from ...runner.model_jobs import ModelJobs
from ...runner.runner import Runner
from ..config import ServiceConfig
from ..errors import UnknownError
from ..publications import Publications
from ..records.futures import Futures
from ..records.models import BACKWARD, LOAD, SAVE_FOR_SAMPLER, STEP, Model
from ..records.store import Store, StoredRequest

_PART = "service training"
_log = logging.getLogger("weightlane.service")
_CATCH_UP_S = 600.0
"""Most seconds that a sampler waits until a model's requests have run again after a crash."""
_POLL_S = 0.05
_REQUESTS_A_STEP = 64
"""A model is saved after ``save_every`` times so many requests, also without an optimizer step: until then, they are kept."""
_WAIT_S = 600.0
"""Most seconds to wait for the ranks between two requests."""


Execute = Callable[[Model, StoredRequest, RunJob], Awaitable[None]]
"""Carries out one request of a model, and answers it. A request that ran before a crash may have an answer, which is kept.

The `RunJob` argument executes the jobs of passes and steps, possibly together with those of other models."""


class TrainingScheduler:
    """Carries out the requests of each model in the order of their numbers. Clients take turns, and so do the models of a client.

    With ``join_clients``, passes of several models are carried out together, and so are steps. Steps, which are short, go before
    passes, but not twice in a row: a model's next pass can then join the others. Passes wait for models that were answered just
    now, and are likely to send another one. A client waits for at most one request of every other client, and ``join_wait_s``
    after them. A model's state is saved every ``save_every`` steps, or after many requests without one. Later requests are kept,
    and run again in the same order after a crash, which gives the same weights, except for rounding if requests are joined.
    """

    def __init__(
        self,
        store: Store,
        futures: Futures,
        runner: Runner,
        jobs: ModelJobs,
        publications: Publications,
        execute: Execute,
        directory: Path,
        config: ServiceConfig,
    ) -> None:
        self._store, self._futures, self._runner, self._jobs = store, futures, runner, jobs
        self._publications, self._execute, self._directory, self._config = publications, execute, directory, config
        self._ahead = False
        """Whether optimizer steps were carried out last. If so, no further ones go before a waiting pass."""
        self.models: OrderedDict[str, Model] = OrderedDict()
        """All models that are not unloaded, by id, least recently served first."""
        self._served: dict[str, int] = {}
        """The number of requests since the start at which each client was last served."""
        self._ranks = asyncio.Condition()
        """Held while requests, or others between them, use the trainer ranks. Its lock is fair: they take turns."""
        self._changed = asyncio.Event()
        self._closing, self._count = False, 0
        directory.mkdir(parents=True, exist_ok=True)

    def model(self, model: str, client: str) -> Model:
        """The model of that id. Raises `UnknownError` if `client` has none."""
        found = self.models.get(model)
        if found is None or found.client != client:
            raise UnknownError(
                f"there is no model {model}.", part=_PART, hint="It may have been unloaded: make one from a checkpoint."
            )
        return found

    def add(self, model: Model) -> None:
        """Add a model, so that it can have requests. The first one, number 0, creates it on the ranks."""
        if self._store.insert(
            "models",
            id=model.id,
            session=model.session,
            client=model.client,
            state="live",
            created=time.time(),
            used=time.time(),
            about={"config": model.stored_config, **model.about},
        ):
            self.models[model.id] = model

    def put(self, request: StoredRequest) -> None:
        """Queue an accepted request for its turn."""
        model = self.models[request.owner]
        if request.seq < model.next_seq:
            late = ProtocolError(
                f"request {request.seq} of {model.id} came after later ones had been given up for it.", part=_PART
            )
            self._futures.fail(request.id, late)
            return
        model.waiting[request.seq] = request
        if request.seq == model.next_seq or len(model.waiting) == 1:
            model.progress = time.monotonic()
        self._changed.set()
        self._store.update("models", model.id, used=time.time())

    @property
    def has_room(self) -> bool:
        """Whether another model can be loaded: always for adapters; for all weights, if the loaded model is settled."""
        return not self._config.trains_weights or all(each.settled for each in self.models.values() if each.loaded)

    def changed(self) -> None:
        """Check again who may use the ranks."""
        self._changed.set()

    def resume(self) -> int:
        """Read the models of an earlier process from the store. Returns their number.

        Each is restored in its turn: from its last saved state, then by the requests since then, in their order.
        """
        for row in self._store.rows("SELECT * FROM models WHERE state = 'live' ORDER BY created"):
            about = dict(row["about"])
            found = about.pop("config", None)
            try:
                config = None if found is None else LoraConfig.model_validate(found)
            except ValidationError as error:
                self._give_up(row["id"], error)
                continue
            if (config is None) != self._config.trains_weights:
                kinds = ("adapters", "all weights") if self._config.trains_weights else ("all weights", "adapters")
                raise ConfigError(
                    f"the service's files have models that are {kinds[0]}, and service.trains says {kinds[1]}.",
                    part=_PART,
                    hint="Set run.dir to another directory, or service.trains as it was.",
                )
            model = Model(row["id"], row["session"], row["client"], config, about, next_seq=row["saved_seq"] + 1)
            if row["saved_dir"]:
                model.saved_seq, model.saved_dir = row["saved_seq"], Path(row["saved_dir"])
            since = self._store.requests_since(model.id, model.saved_seq)
            model.waiting = {each.seq: each for each in since if each.payload}
            self.models[model.id] = model
        self._changed.set()
        return len(self.models)

    def give_up_gaps(self, timeout_s: float) -> None:
        """Fail requests that have waited for more than `timeout_s` seconds for an earlier one that never arrived.

        Each still has its turn, like a request that failed before a crash, so that a crash does not change the result.
        """
        for model in self.models.values():
            if not model.waiting or model.next_seq in model.waiting or time.monotonic() - model.progress < timeout_s:
                continue
            error = ProtocolError(
                f"request {model.next_seq} of {model.id} has not arrived, which comes before this one.",
                part=_PART,
                hint="It was refused or lost. Gradients that it should have added are missing: start the step over.",
            )
            for seq, request in model.waiting.items():
                self._futures.fail(request.id, error, keep_payload=True)
                model.waiting[seq] = replace(request, state="failed")
            self._changed.set()

    async def run(self) -> None:
        """Carry out requests until `close`. Raises errors that end the service, such as the death of a rank."""
        while not self._closing:
            self._changed.clear()
            async with self._ranks:
                self._ranks.notify_all()
                models = self._next()
                late_s = self._late_s(models)
                if models and late_s <= 0:
                    await self._serve_all(models)
                    continue
            with suppress(TimeoutError):
                async with asyncio.timeout(late_s if models else None):
                    await self._changed.wait()
        async with self._ranks:
            self._ranks.notify_all()

    @asynccontextmanager
    async def between_requests(self, ready: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
        """Use the trainer ranks inside the block, between two requests, once `ready`.

        Raises `DeadlineExceededError` if that takes ten minutes. `close` cancels who waits: their requests stay in the store.
        """
        try:
            async with asyncio.timeout(_WAIT_S) as limit, self._ranks:
                await self._ranks.wait_for(lambda: self._closing or ready())
                limit.reschedule(None)
                if self._closing:
                    raise asyncio.CancelledError
                try:
                    yield
                finally:
                    self._changed.set()
        except TimeoutError as cause:
            if not limit.expired():
                raise
            raise DeadlineExceededError(
                f"the trainer ranks were not free within {_WAIT_S:.0f} s.",
                part=_PART,
                hint="Another version is on its way, or the model that they have is amid a mini-batch: optim_step ends it.",
            ) from cause

    async def save(self, model: Model, until: int | None = None) -> None:
        """Save the complete state of a settled model, so that no request so far, or up to `until`, runs again."""
        seq, old = model.next_seq - 1 if until is None else until, model.saved_dir
        if seq == model.saved_seq:
            return
        place = self._directory / model.file_name / str(seq)
        shutil.rmtree(place, ignore_errors=True)  # a process that was killed may have left it
        place.parent.mkdir(exist_ok=True)
        await self._jobs.save(model.adapter, place, optimizer=True)
        self._store.saved(model.id, seq, place)
        model.saved_seq, model.saved_dir, model.saved_steps = seq, place, model.steps
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    async def bring_back(self, model: Model) -> None:
        """Load a model that is in files onto the ranks. Does nothing for one that is loaded, or was never saved."""
        if model.loaded or model.saved_dir is None:
            return
        await self.make_room()
        model.steps = model.saved_steps = await self._jobs.create(model.adapter, model.config, model.saved_dir)
        model.loaded = True

    async def caught_up(self, model: Model) -> None:
        """Wait until a model's requests from before a crash have run again. Raises `DeadlineExceededError`."""
        try:
            async with asyncio.timeout(_CATCH_UP_S):
                while model.repeats:  # noqa: ASYNC110 - the scheduler's own steps change it
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as cause:
            raise DeadlineExceededError(
                f"{model.id} was not brought back within {_CATCH_UP_S} s.", part=_PART
            ) from cause

    async def remove(self, model: Model, state: str = "unloaded") -> None:
        """Unload a model. Its checkpoints stay. Idempotent. To be called from `Execute` or in `between_requests`."""
        if model.id not in self.models:
            return
        self._store.update("models", model.id, state=state)
        del self.models[model.id]
        gone = ConfigError(f"the model {model.id} was unloaded.", part=_PART)
        for request in model.waiting.values():
            self._futures.fail(request.id, gone)
        if model.loaded:
            await self._jobs.remove(model.adapter)
        shutil.rmtree(self._directory / model.file_name, ignore_errors=True)
        self._store.drop_payloads(model.id)

    async def remove_of(self, sessions: Collection[str]) -> None:
        """Unload the models of these sessions between two requests. One for which the ranks are not free in time is left."""
        for model in [each for each in self.models.values() if each.session in sessions]:
            with suppress(WorkerDiedError, DeadlineExceededError):  # whoever watches the ranks raises the first, too
                async with self.between_requests():
                    await self.remove(model)

    async def make_room(self) -> None:
        """Move the least recently served settled models to files until their next request, to make room for one more."""
        on_ranks = [each for each in self.models.values() if each.loaded]
        most = 1 if self._config.trains_weights else self._config.max_loaded
        for model in [each for each in on_ranks if each.settled][: max(0, len(on_ranks) - most + 1)]:
            try:
                await self.save(model)
                await self._jobs.remove(model.adapter)
                model.loaded = False
            except StorageError:
                if self._config.trains_weights:  # others would take its place
                    raise
                _log.exception("model %s stays on the ranks", model.id)

    def close(self) -> None:
        """Let `run` end after the current requests. Waiting requests stay in the store."""
        self._closing = True
        self._changed.set()

    def _next(self) -> list[Model]:
        """The models whose requests are next: the least recently served of the least recently served client, or joined ones."""
        ready = []
        for model in self.models.values():
            if model.next_seq not in model.waiting and (repeats := model.repeats):
                missing, model.next_seq = model.next_seq, min(repeats)
                model.spoiled, model.open = model.spoiled or f"request {missing} never arrived.", True
            request = model.waiting.get(model.next_seq)
            if request is not None and (model.loaded or self.has_room) and self._may_run(request):
                ready.append(model)
        ready.sort(key=lambda model: self._served.get(model.client, 0))
        steps, passes = (self._joining(ready, kind) for kind in (STEP, BACKWARD))
        if ready[:1] == passes[:1]:
            return steps if steps and not self._ahead else passes  # after these steps, more passes can join
        return steps if ready[:1] == steps[:1] else ready[:1]

    def _may_run(self, request: StoredRequest) -> bool:
        """Whether a request can run without waiting for a publication in progress."""
        return request.kind not in (SAVE_FOR_SAMPLER, LOAD) or not self._publications.busy

    def _joining(self, ready: Sequence[Model], kind: str) -> list[Model]:
        """The loaded models of `ready` whose next request is of `kind` and may be carried out together with others."""
        if not self._config.join_clients:
            return []
        return [each for each in ready if each.loaded and each.waiting[each.next_seq].kind == kind]

    def _late_s(self, models: Sequence[Model]) -> float:
        """Seconds that passes should wait for those of models that were answered just now."""
        if not self._joining(models, BACKWARD):
            return 0.0
        idle = [each.progress for each in self.models.values() if each.loaded and not each.waiting]
        return max(idle, default=-math.inf) + self._config.join_wait_s - time.monotonic()

    async def _serve_all(self, models: Sequence[Model]) -> None:
        """Carry out the next request of each of `models`."""
        self._ahead = bool(self._joining(models, STEP))
        jobs, serving = JobJoiner(self._runner, len(models)), []
        for model in models:
            self.models.move_to_end(model.id)
            self._served[model.client] = self._count = self._count + 1
            serving.append(self._serve(model, model.waiting.pop(model.next_seq), jobs))
        for ended in await asyncio.gather(*serving, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended

    async def _serve(self, model: Model, request: StoredRequest, jobs: JobJoiner) -> None:
        """Carry out a request, whose jobs may be joined with those of others."""
        try:
            await self._carry_out(model, request, jobs.run)
        finally:
            jobs.leave()

    async def _carry_out(self, model: Model, request: StoredRequest, run: RunJob) -> None:
        model.next_seq, model.progress = request.seq + 1, time.monotonic()
        try:
            await self.bring_back(model)
            await self._execute(model, request, run)
            model.progress = time.monotonic()
        except (WorkerDiedError, asyncio.CancelledError):
            raise  # it stays queued, and runs again
        except Exception as error:
            if not isinstance(error, ConfigError | ProtocolError):
                _log.exception("request %s failed", request.id)
            if await self._futures.service_is_ending(error):
                raise  # as above
            self._futures.fail(request.id, error, keep_payload=True)
            if not request.seq:  # there is no such model then
                await self.remove(model, "failed")
        every, since = self._config.save_every, model.next_seq - 1 - model.saved_seq
        due = model.steps >= model.saved_steps + every or since >= _REQUESTS_A_STEP * every
        if due and model.id in self.models and model.loaded and model.settled:
            try:
                await self.save(model)
            except StorageError:  # requests are kept, so that nothing is lost; the next step tries again
                _log.exception("model %s cannot be saved", model.id)

    def _give_up(self, model: str, error: Exception) -> None:
        """Mark a model whose entry is damaged, and fail its requests."""
        _log.error("model %s cannot be brought back: %s", model, error)
        self._store.update("models", model, state="damaged")
        for request in self._store.requests_since(model, -1):
            self._futures.fail(request.id, error)
