"""`Service`: sessions, models, samplers and checkpoints of all clients, over trainer ranks and replicas. Independent of HTTP."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError, Deadline, ProtocolError, StorageError, WeightlaneError, WorkerDiedError

from ..config import LoraConfig
from ..loop.protocols import Rollout, Syncer
from ..runner.model_jobs import ModelJobs
from ..runner.runner import Runner
from .config import ServedModel, ServiceConfig
from .errors import BusyError, UnknownError
from .publications import Publications
from .records.checkpoints import Checkpoints
from .records.futures import Futures
from .records.models import BACKWARD, CREATE, LOAD, Model
from .records.sessions import Sessions
from .records.store import DATABASE, Store, StoredRequest
from .samplers import SAMPLE, Sampler, Samplers
from .training.operations import Operations, sampler_id
from .training.scheduler import TrainingScheduler
from .wire.batches import TrainBody
from .wire.requests import CreateModelRequest, LoadWeightsRequest
from .wire.sampling_requests import SampleRequest

_PART = "service"
_log = logging.getLogger("weightlane.service")
_HOUSEKEEPING_S = 5.0


class Service:
    """The operations that clients can request.

    `describe` converts an adapter's configuration to what replicas need to know. A version may take `sync_timeout_s` until it is
    in service.
    """

    def __init__(
        self,
        config: ServiceConfig,
        directory: Path,
        base: ServedModel,
        runner: Runner,
        syncer: Syncer,
        replicas: Sequence[Rollout],
        describe: Callable[[LoraConfig], Any],
        sync_timeout_s: float,
    ) -> None:
        self.config, self.base = config, base
        self._runner, self._syncer = runner, syncer
        self._replicas, self._living = replicas, {replica.name: replica for replica in replicas}
        directory.mkdir(parents=True, exist_ok=True)
        self.store = Store(directory / DATABASE)
        self.futures = Futures(self.store)
        self.sessions = Sessions(self.store, config.session_timeout_s)
        self.checkpoints = Checkpoints(self.store, directory / "checkpoints")
        jobs = ModelJobs(runner, base.directory)
        announced = None if config.trains_weights else describe
        self.publications = Publications(runner, syncer, self._living, announced, config.max_versions, sync_timeout_s)
        self._operations = Operations(self.futures, runner, jobs, self.checkpoints, self.publications, base, config)
        execute, load_sampler = self._operations.execute, self._operations.load_sampler
        self.scheduler = TrainingScheduler(
            self.store, self.futures, runner, jobs, self.publications, execute, directory / "models", config
        )
        self.samplers = Samplers(
            self.store, self.futures, self.checkpoints, self.publications, self._living, load_sampler, base, config
        )
        self._operations.scheduler, self._operations.samplers = self.scheduler, self.samplers
        self._training: asyncio.Task[None] | None = None
        self._closing = False

    async def run(self) -> None:
        """Serve until `close`, beginning with requests that an earlier process left.

        Raises `WorkerDiedError` if a rank or all replicas died, `StorageError` if an answer cannot be stored.
        """
        self.sessions.give_time()
        models, samples = self.scheduler.resume(), self.samplers.resume()
        if models or samples:
            _log.info("going on with %d models and %d sampling requests", models, samples)
        self._training = asyncio.create_task(self.scheduler.run(), name="training scheduler")
        tasks: list[asyncio.Task[Any]] = [
            self._training,
            asyncio.create_task(self._runner.watch(), name="trainer ranks"),
            asyncio.create_task(self._watch_replicas(), name="replicas"),
            asyncio.create_task(self.futures.watch(), name="answers"),
            asyncio.create_task(self._keep_house(), name="housekeeping"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self, wait_s: float = 0.0) -> None:
        """Wait up to `wait_s` for running requests. Others are in the store, and run after the next start."""
        if self._closing:
            return
        self._closing = True
        deadline = Deadline.after(wait_s)
        self.futures.close()
        self.scheduler.close()
        if self._training is not None:
            await asyncio.wait([self._training], timeout=deadline.remaining_s)
            self._training.cancel()
            await asyncio.gather(self._training, return_exceptions=True)
        await self.samplers.close(deadline.remaining_s)
        await self._operations.close(deadline.remaining_s)
        self.store.close()

    def create_model(self, client: str, asked: CreateModelRequest, payload: bytes) -> StoredRequest:
        """Begin to create a model: an adapter of the base model, or all its weights."""
        self.sessions.require(asked.session_id, client)
        self._check_base(asked.base_model)
        lora, config, train = asked.lora_config, None, dict.fromkeys(("attention", "mlp", "unembed"), True)
        if not self.config.trains_weights:
            if lora is None:
                raise ConfigError(
                    "training of all weights is not offered here: every model is an adapter.",
                    part=_PART,
                    hint="Pass a lora_config, as create_lora_training_client does, or set service.trains to all_weights.",
                )
            if lora.rank > self.config.max_lora_rank:
                raise ConfigError(
                    f"rank {lora.rank} is above {self.config.max_lora_rank}, the largest here.",
                    part=_PART,
                    hint="Ask for less, or raise service.max_lora_rank.",
                )
            train = {"attention": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
            config = self._lora_config(lora.rank, train, lora.seed)
        about = {"base_model": self.base.name, "train": train, "user_metadata": asked.user_metadata or {}}
        model = Model(f"{asked.session_id}:train:{asked.model_seq_id}", asked.session_id, client, config, about)
        return self._made(model, CREATE, payload)

    def load_as_model(self, client: str, asked: LoadWeightsRequest, payload: bytes) -> StoredRequest:
        """Begin to create a model from a checkpoint."""
        assert asked.session_id is not None
        self.sessions.require(asked.session_id, client)
        self._check_base(asked.base_model)
        found = self.checkpoints.get(asked.path, client)
        self._operations.check_kind(found)
        about = {key: found.about.get(key, {}) for key in ("base_model", "train")}
        about["user_metadata"] = asked.user_metadata or {}
        model = Model(f"{asked.session_id}:train:{asked.model_seq_id}", asked.session_id, client, found.config, about)
        return self._made(model, LOAD, payload)

    def train(
        self, client: str, kind: str, model: str, seq: int, payload: bytes, refusal: WeightlaneError | None = None
    ) -> StoredRequest:
        """Accept a request of a model. Raises `BusyError` if too many wait.

        A request with a `refusal` fails with it at once. It still has its turn, because later requests wait for its number.
        """
        found = self.scheduler.model(model, client)
        self.sessions.require(found.session, client)
        if len(found.waiting) >= self.config.max_queued:
            raise BusyError(f"{self.config.max_queued} requests of {model} wait.", part=_PART, hint="Try again later.")
        request, new = self.futures.accept(kind, model, seq, client, payload)
        if new and refusal is not None:
            self.futures.fail(request.id, refusal, keep_payload=True)
            request = replace(request, state="failed")
        if new:
            self.scheduler.put(request)
        return request

    def backward(self, client: str, payload: bytes) -> StoredRequest:
        """Accept a request for a forward and backward pass in protobuf.

        A request that can't be carried out is accepted, too, and answered by an error, because later requests wait for its
        number.
        """
        body = TrainBody.parse(payload)
        return self.train(client, BACKWARD, body.model_id, body.seq_id, payload)

    def refuse_backward(self, client: str, address: bytes, error: WeightlaneError) -> StoredRequest:
        """Accept a pass of which only the address was read, and answer it by `error`. Raises `error` if the address is invalid.

        Whether the pass should have had a gradient is at the end of its body, which was not read. So it counts as one with
        gradient.
        """
        try:
            body = TrainBody.parse(address)
        except ProtocolError:
            raise error from None
        return self.train(client, BACKWARD, body.model_id, body.seq_id, address, error)

    def create_sampler(self, client: str, session: str, seq: int, base_model: str | None, path: str | None) -> Sampler:
        """Create a sampler of the base model or of a checkpoint."""
        self.sessions.require(session, client)
        self._check_base(base_model)
        return self.samplers.create(sampler_id(session, seq), session, client, checkpoint=path)

    def sampler(self, sampler: str, client: str) -> Sampler:
        """The sampler of that id, for a further request. Raises `UnknownError`, or `ClosedError` if its session has ended."""
        found = self.samplers.get(sampler, client)
        if found.session:
            self.sessions.require(found.session, client)
        return found

    def sample(self, client: str, asked: SampleRequest, payload: bytes) -> StoredRequest:
        """Begin a sampling request. Raises `BusyError` if too many run or wait."""
        if self.samplers.running >= self.config.max_sampling:
            raise BusyError(f"{self.config.max_sampling} sampling requests wait.", part=_PART, hint="Try again later.")
        owner, seq = asked.sampling_session_id, asked.seq_id
        if owner is None or seq is None:
            owner, seq = self._single_sampler(client, asked), 0
        self.sampler(owner, client)
        request, new = self.futures.accept(SAMPLE, owner, seq, client, payload)
        if new:
            self.samplers.start(request)
        return request

    def figures(self) -> dict[str, float]:
        """The values of ``/metrics``, by name."""
        figures: dict[str, float] = {
            "models": len(self.scheduler.models),
            "models_loaded": sum(model.loaded for model in self.scheduler.models.values()),
            "training_requests_waiting": sum(len(model.waiting) for model in self.scheduler.models.values()),
            "sampling_requests_running": self.samplers.running,
            "sampled_tokens_total": self.samplers.tokens,
            "versions_loaded": len(self.publications.versions),
        }
        for kind, each in self._runner.figures.items():
            figures[f'jobs_total{{kind="{kind}"}}'] = each.count
            figures[f'job_failures_total{{kind="{kind}"}}'] = each.failures
            figures[f'job_seconds_total{{kind="{kind}"}}'] = each.seconds
            figures[f'job_tokens_total{{kind="{kind}"}}'] = each.tokens
        return figures

    def _made(self, model: Model, kind: str, payload: bytes) -> StoredRequest:
        if model.id not in self.scheduler.models and len(self.scheduler.models) >= self.config.max_models:
            raise BusyError(f"there are {self.config.max_models} models.", part=_PART, hint="Unload one, or wait.")
        with self.store.transaction():
            self.scheduler.add(model)
            request, new = self.futures.accept(kind, model.id, 0, model.client, payload)
        if new:
            self.scheduler.put(request)
        return request

    def _single_sampler(self, client: str, asked: SampleRequest) -> str:
        """Create a sampler for one request that names no sampling session. Returns its id."""
        self._check_base(asked.base_model)
        sampler = f"single-{secrets.token_hex(8)}"
        self.samplers.create(sampler, "", client, checkpoint=asked.model_path)
        return sampler

    def _lora_config(self, rank: int, train: Mapping[str, bool], seed: int | None) -> LoraConfig:
        targets = tuple(sorted(leaf for leaf, part in self.base.layers.items() if train[part]))
        if not targets:
            raise ConfigError(
                "an adapter of the unembedding layer alone is not offered.",
                part=_PART,
                hint="Set train_attn or train_mlp: adapters are beside the linear layers of decoder layers.",
            )
        everything = set(targets) == set(self.base.layers)
        return LoraConfig(
            rank=rank,
            alpha=self.config.lora_alpha,
            targets=() if everything else targets,
            seed=secrets.randbits(32) if seed is None else seed,
            publish="adapter",
        )

    def _check_base(self, name: str | None) -> None:
        if name and name != self.base.name:
            raise UnknownError(
                f"there is no base model {name!r}.", part=_PART, hint=f"This service has {self.base.name!r}."
            )

    async def _watch_replicas(self) -> None:
        """Continue without replicas that die. Raises when none is left, unless there was none."""

        async def watch(replica: Rollout) -> None:
            try:
                await replica.watch()
            except WorkerDiedError as error:
                self._living.pop(replica.name, None)
                if not self._living:
                    raise
                _log.error("going on without a replica: %s", error)
                self._syncer.participant_lost(error, replica.name)

        await asyncio.gather(*(watch(replica) for replica in self._replicas))
        await asyncio.Event().wait()

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            try:
                self.sessions.end_silent()
                ended = {row["id"] for row in self.store.rows("SELECT id FROM sessions WHERE ended IS NOT NULL")}
                await self.scheduler.remove_of(ended)
                self.scheduler.give_up_gaps(self.config.gap_timeout_s)
                self.futures.forget(self.config.answer_kept_s)
                self.checkpoints.drop_expired()
            except StorageError:  # a request whose answer cannot be stored ends the service; this is tried again
                _log.exception("what has ended or expired stays")
