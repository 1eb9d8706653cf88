"""`Operations`: carries out the requests of models, one at a time, on the trainer ranks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from weightlane.ckpt_engines import ConfigError, ProtocolError, StorageError

from ...data.batch import LossDenominators
from ...objectives.loss import LOGPROBS
from ...runner.job_joiner import RunJob
from ...runner.jobs import DropGradient, Forward, ForwardBackward, OptimStep
from ...runner.model_jobs import ModelJobs
from ...runner.runner import Runner
from ..config import ServedModel, ServiceConfig
from ..errors import UnknownError
from ..losses import ServiceLoss, loss_report
from ..publications import Publications
from ..records.checkpoints import Checkpoint, Checkpoints, Kind
from ..records.futures import PROTOBUF, Futures
from ..records.models import BACKWARD, CREATE, LOAD, SAVE, SAVE_EXTERNAL, SAVE_FOR_SAMPLER, STEP, UNLOAD, Model
from ..records.store import StoredRequest
from ..samplers import Sampler, Samplers, inflight_key
from ..wire import requests as wire
from ..wire.answers import pass_answer, training_metrics
from ..wire.batches import TrainBody
from .scheduler import TrainingScheduler

_PART = "service"
_WHOLE = LossDenominators(1.0, 1.0)
"""Denominators of 1: losses of the service are sums, so all parts of a mini-batch have the same denominators."""


class Operations:
    """Every operation on a model. See `TrainingScheduler`, which calls `execute`."""

    def __init__(
        self,
        futures: Futures,
        runner: Runner,
        jobs: ModelJobs,
        checkpoints: Checkpoints,
        publications: Publications,
        base: ServedModel,
        config: ServiceConfig,
    ) -> None:
        self._futures, self._runner, self._jobs, self._checkpoints = futures, runner, jobs, checkpoints
        self._publications, self._base, self._config = publications, base, config
        self._syncing: set[asyncio.Task[None]] = set()
        self.scheduler: TrainingScheduler
        self.samplers: Samplers

    async def execute(self, model: Model, request: StoredRequest, run: RunJob) -> None:
        """See `Execute`."""
        if request.state == "failed":  # before a crash, or before its turn: it changed no weight then, and doesn't now
            if request.kind == STEP:
                await self._drop_gradient(model)
            elif request.kind == BACKWARD and not TrainBody.parse(request.payload).forward_only:
                _spoil(model, "it was refused, or failed before the service was started again.")
            return
        operation = getattr(self, f"_{request.kind}")
        await (operation(model, request, run) if request.kind in (BACKWARD, STEP) else operation(model, request))

    async def load_sampler(self, sampler: Sampler) -> None:
        """Publish a sampler's weights to the replicas: those of its checkpoint, of its model now, or of the base model."""
        if sampler.checkpoint is None and sampler.model is not None:
            await self.scheduler.caught_up(self.scheduler.model(sampler.model, sampler.client))
        async with self.scheduler.between_requests(lambda: self._may_begin_for(sampler)):
            version = await self._begin_for(sampler)
        try:
            await self._publications.finish(sampler.key, version)
        finally:
            self.scheduler.changed()

    async def close(self, wait_s: float) -> None:
        """Wait up to `wait_s` for publications in progress. Requests of unfinished ones run again after the next start."""
        left = list(self._syncing)
        if left:
            await asyncio.wait(left, timeout=wait_s)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _create_model(self, model: Model, request: StoredRequest) -> None:
        await self.scheduler.make_room()
        await self._jobs.create(model.adapter, model.config)
        model.loaded = True
        self._answer(request, {"type": CREATE, "model_id": model.id})

    async def _load_weights(self, model: Model, request: StoredRequest) -> None:
        asked = wire.request(wire.LoadWeightsRequest, request.payload)
        found = self._checkpoints.get(asked.path, model.client)
        self.check_kind(found)
        if not model.loaded:
            await self.scheduler.make_room()
        elif self._config.trains_weights:
            await self._save_before(model, request)
        try:
            steps = self._jobs.create(model.adapter, model.config, found.directory, optimizer=asked.optimizer)
            model.steps = await steps
        except StorageError:
            if self._config.trains_weights:
                model.loaded = False  # neither the old weights nor the new ones are there
            raise
        model.saved_steps, model.loaded, model.open, model.spoiled = model.steps, True, False, ""
        await self.scheduler.save(model)  # the checkpoint may be deleted before a crash
        self._answer(request, {"type": LOAD, "path": asked.path, "model_id": model.id})

    async def _save_before(self, model: Model, request: StoredRequest) -> None:
        """Save all weights before `request` replaces them, because it may fail half-way."""
        if model.open:
            await self._drop_gradient(model)
            _spoil(model, "other weights were loaded, or should have been.")
        await self.scheduler.save(model, request.seq - 1)

    async def _forward_backward(self, model: Model, request: StoredRequest, run: RunJob) -> None:
        body = TrainBody.parse(request.payload)
        try:
            answer = await self._pass(model, body, run)
        except Exception as error:
            if not body.forward_only:  # until the step, since other parts may be queued already
                _spoil(model, str(error))
            raise
        self._futures.finish(request.id, answer, PROTOBUF, keep_payload=True)

    async def _pass(self, model: Model, body: TrainBody, run: RunJob) -> bytes:
        """Run the model forward, and backward unless the request is forward-only. Returns the answer."""
        vocabulary = self._base.vocabulary
        asked = body.request(vocabulary) if body.decodes_at_once else await asyncio.to_thread(body.request, vocabulary)
        longest = max(sequence.length for sequence in asked.batch.sequences)
        if longest > self._base.max_length:
            raise ConfigError(
                f"a sequence has {longest} tokens, and the model takes {self._base.max_length}.", part=_PART
            )
        loss = ServiceLoss(asked.loss, asked.loss_config)
        loss.check_inputs(asked.batch)
        if model.spoiled and not body.forward_only:
            raise _incomplete(model)
        if body.forward_only:
            outputs = await self._runner.run(Forward(asked.batch, LOGPROBS, adapter=model.adapter))
            report = loss_report(loss, asked.batch, [each["logprobs"] for each in outputs])
        else:
            model.open = True
            passed = await run(ForwardBackward(asked.batch, loss, _WHOLE, LOGPROBS, model.adapter))
            report, outputs = dict(passed.metrics), list(passed.outputs)
        return pass_answer([each["logprobs"] for each in outputs], asked.shapes, training_metrics(report))

    async def _optim_step(self, model: Model, request: StoredRequest, run: RunJob) -> None:
        try:
            if model.spoiled:
                raise _incomplete(model)
            params = wire.request(wire.OptimStepRequest, request.payload).params()
        except ProtocolError:
            await self._drop_gradient(model)  # the step ends its mini-batch, also where it runs again after a crash
            raise
        try:
            result = await run(OptimStep(model.adapter, params))
        finally:
            model.open = False
        if result.skipped:
            raise ProtocolError(result.skipped, part=_PART, hint="The weights are unchanged; go on, or lower the rate.")
        model.steps = result.step
        self._answer(request, {"metrics": {"grad_norm": result.grad_norm, "step": float(result.step)}})

    async def _save_weights(self, model: Model, request: StoredRequest) -> None:
        asked = wire.request(wire.SaveWeightsRequest, request.payload)
        name = asked.path or f"step-{model.steps}-{request.seq}"
        path = await self._save(model, request, "training", name, asked, overwrite=asked.overwrite)
        self._answer(request, {"type": SAVE, "path": path})

    async def _save_weights_external(self, model: Model, request: StoredRequest) -> None:
        asked = wire.request(wire.SaveWeightsExternalRequest, request.payload)
        path = await self._save(model, request, "external", asked.path, asked)
        self._answer(request, {"type": SAVE_EXTERNAL, "path": path})

    async def _save_weights_for_sampler(self, model: Model, request: StoredRequest) -> None:
        asked = wire.request(wire.SaveWeightsForSamplerRequest, request.payload)
        answer: dict[str, Any] = {"type": SAVE_FOR_SAMPLER}
        if asked.kind == "inflight":
            key, path = inflight_key(model.id), None
        else:
            name = asked.path or f"snapshot-{request.seq}"
            path = await self._save(model, request, "sampler", name, asked)
            key = str(self._checkpoints.place(model.id, "sampler", name, request.seq)[1])
        if asked.path is None:
            sampler = sampler_id(model.session, asked.sampling_session_seq_id or 0)
            self.samplers.create(sampler, model.session, model.client, checkpoint=path, model=model.id)
            answer["sampling_session_id"] = sampler
        else:
            answer["path"] = path
        if request.state != "queued":
            return  # it is published again when a client samples from it
        version = await self._publications.begin(model.adapter, model.config)
        model.publishing += 1
        task = asyncio.get_running_loop().create_task(self._finish(key, version, model, request, answer))
        self._syncing.add(task)
        task.add_done_callback(self._syncing.discard)

    async def _unload_model(self, model: Model, request: StoredRequest) -> None:
        await self.scheduler.remove(model)
        self._answer(request, {"type": UNLOAD, "model_id": model.id})

    async def _save(
        self, model: Model, request: StoredRequest, kind: Kind, name: str, asked: Any, *, overwrite: bool = False
    ) -> str:
        """Write a checkpoint, unless this request has done so before. Returns its path."""
        unnamed = kind == "sampler" and asked.path is None
        path, directory = self._checkpoints.place(model.id, kind, name, request.seq)
        if (made := self._checkpoints.made_by(request.id)) is not None:
            return made.path
        if request.state != "queued":
            return path  # it was made, and deleted since
        self._checkpoints.prepare(path, directory, overwrite=overwrite)
        await self._jobs.save(model.adapter, directory, optimizer=kind == "training")
        about = {
            "request": request.id,
            "config": model.stored_config,
            "base_model": model.about.get("base_model", ""),
            "train": model.about.get("train", {}),
            "user_metadata": asked.user_metadata,
            **({"unnamed": 1} if unnamed else {}),
        }
        ttl_s = self._config.snapshot_kept_s if unnamed else asked.ttl_seconds
        self._checkpoints.add(path, model.id, model.client, kind, directory, about, ttl_s)
        return path

    def check_kind(self, found: Checkpoint) -> None:
        """Raise `ConfigError` unless a checkpoint is of the kind that this service trains: an adapter, or all weights."""
        if (found.config is None) != self._config.trains_weights:
            raise ConfigError(
                f"{found.path} has {'all weights' if found.config is None else 'an adapter'}, which this service does not train.",
                part=_PART,
                hint="Its configuration says what it trains, in service.trains.",
            )

    def _may_begin_for(self, sampler: Sampler) -> bool:
        """Whether a sampler's weights could be published now."""
        loaded = sampler.checkpoint is None and any(
            each.loaded for each in self.scheduler.models.values() if each.id == sampler.model
        )
        return not self._publications.busy and (loaded or self.scheduler.has_room)

    async def _begin_for(self, sampler: Sampler) -> int:
        if sampler.checkpoint is None and sampler.model is not None:
            model = self.scheduler.model(sampler.model, sampler.client)
            await self.scheduler.bring_back(model)
            return await self._publications.begin(model.adapter, model.config)
        directory, config = None, None  # the base model's
        if sampler.checkpoint is not None:
            found = self._checkpoints.get(sampler.checkpoint, sampler.client)
            self.check_kind(found)
            if str(found.directory) != sampler.directory:
                raise UnknownError(
                    f"{found.path} has other weights than when the sampler was made.",
                    part=_PART,
                    hint="Make a new one.",
                )
            directory, config = found.directory, found.config
        name = None if self._config.trains_weights else "published-from-files"
        await self.scheduler.make_room()
        await self._jobs.create(name, config, directory, optimizer=False)
        try:
            return await self._publications.begin(name, config)
        finally:
            await self._jobs.remove(name)

    async def _drop_gradient(self, model: Model) -> None:
        """Drop a model's gradients and the record of a failure, so that its mini-batch can start over."""
        model.spoiled, model.open = "", False
        await self._runner.run(DropGradient(model.adapter))

    async def _finish(
        self, key: str, version: int, model: Model, request: StoredRequest, answer: dict[str, Any]
    ) -> None:
        try:
            await self._publications.finish(key, version)
        except Exception as error:  # noqa: BLE001 - the client gets it
            if await self._futures.service_is_ending(error):
                return  # it runs again after the next start, and the model is not settled until then
            self._futures.fail(request.id, error, keep_payload=True)
        else:
            self._answer(request, answer)
        model.publishing -= 1
        self.scheduler.changed()

    def _answer(self, request: StoredRequest, answer: dict[str, Any]) -> None:
        self._futures.finish(request.id, json.dumps(answer).encode(), keep_payload=True)


def _spoil(model: Model, reason: str) -> None:
    """Mark a model's entire mini-batch as failed, with the first `reason`."""
    model.spoiled, model.open = model.spoiled or reason, True


def _incomplete(model: Model) -> ProtocolError:
    return ProtocolError(
        f"a part of the mini-batch has no gradient: {model.spoiled}",
        part=_PART,
        hint="optim_step ends the mini-batch, and changes nothing; then start it over.",
    )


def sampler_id(session: str, seq: int) -> str:
    """The id of a session's sampler number `seq`."""
    return f"{session}:sample:{seq}"
