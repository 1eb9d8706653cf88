"""`Samplers`: sampling sessions, and the requests to them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from weightlane.ckpt_engines import ConfigError, WorkerDiedError

from ..loop.protocols import Rollout
from .config import ServedModel, ServiceConfig
from .errors import UnknownError
from .publications import BASE, Publications
from .records.checkpoints import Checkpoints
from .records.futures import PROTOBUF, Futures
from .records.store import Store, StoredRequest
from .wire.answers import Sample, sample_answer
from .wire.requests import request as parsed
from .wire.sampling_requests import SampleRequest

SAMPLE = "sample"
_Entry = TypeVar("_Entry")
_PART = "service sampling"
_log = logging.getLogger("weightlane.service")
_MOST_DEATHS = 3
"""Replica deaths, also in earlier processes, after which a request fails, because it may be their cause."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampling session."""

    id: str
    session: str
    """Empty for one that was made for a single request."""
    client: str
    model: str | None
    """The model whose newest published weights it samples from, or of whose snapshot it was made; None for other samplers."""
    checkpoint: str | None
    """The path of its checkpoint; None for the base model and for samplers in flight."""
    directory: str | None
    """The directory of its checkpoint. A later one of the same path has another."""

    @property
    def key(self) -> str:
        """The key of its weights in `Publications`."""
        if self.directory is not None:
            return self.directory
        return inflight_key(self.model) if self.model is not None else BASE


def inflight_key(model: str) -> str:
    """The key of a model's newest published weights, which its samplers in flight share."""
    return f"{model}:inflight"


class Samplers:
    """Answers sampling requests, each on the replica with the least load.

    Replicas that die are removed from `replicas`. `load` publishes a sampler's weights to the others, if they don't have them.
    """

    def __init__(
        self,
        store: Store,
        futures: Futures,
        checkpoints: Checkpoints,
        publications: Publications,
        replicas: dict[str, Rollout],
        load: Callable[[Sampler], Coroutine[Any, Any, None]],
        base: ServedModel,
        config: ServiceConfig,
    ) -> None:
        self._store, self._futures, self._checkpoints = store, futures, checkpoints
        self._publications, self._load, self._base, self._config = publications, load, base, config
        self._replicas = replicas
        self._load_of: Counter[str] = Counter()
        self._loading: dict[str, asyncio.Task[None]] = {}
        """Running loads of weights, by key. They are completed even if the requests that started them are cancelled."""
        self._running: dict[str, asyncio.Task[None]] = {}
        self.tokens = 0
        """Tokens sampled since the start."""

    @property
    def running(self) -> int:
        """Requests that run or wait."""
        return len(self._running)

    def create(
        self, sampler: str, session: str, client: str, *, checkpoint: str | None = None, model: str | None = None
    ) -> Sampler:
        """Create a sampler, or return the one of that id. Raises `UnknownError` for a checkpoint that doesn't exist."""
        found = None if checkpoint is None else self._checkpoints.get(checkpoint, client)
        self._store.insert(
            "samplers",
            id=sampler,
            session=session,
            client=client,
            model=model,
            checkpoint=checkpoint,
            directory=None if found is None else str(found.directory),
            # For the page of `weightlane report`.
            inflight=int(model is not None and checkpoint is None),
            created=time.time(),
        )
        return self.get(sampler, client)

    def get(self, sampler: str, client: str) -> Sampler:
        """The sampler of that id. Raises `UnknownError` if `client` has none."""
        row = self._store.row(
            "SELECT id, session, client, model, checkpoint, directory FROM samplers WHERE id = ? AND client = ?",
            sampler,
            client,
        )
        if row is None:
            raise UnknownError(f"there is no sampler {sampler}.", part=_PART)
        return Sampler(**row)

    def join(self, sampler: str) -> int:
        """Assign a unique number to one more client of a sampler. The first client has 0."""
        with self._store.transaction():
            row = self._store.row("SELECT clients FROM samplers WHERE id = ?", sampler)
            assert row is not None
            self._store.update("samplers", sampler, clients=row["clients"] + 1)
        return int(row["clients"])

    def start(self, request: StoredRequest) -> None:
        """Begin to answer an accepted request."""
        if request.id not in self._running:
            task = asyncio.get_running_loop().create_task(self._answer(request))
            self._running[request.id] = task
            task.add_done_callback(lambda _: self._running.pop(request.id, None))

    def cancel(self, request: str) -> None:
        """Cancel a running request, because its client has given it up."""
        if (task := self._running.get(request)) is not None:
            self._futures.fail(request, ConfigError("the request was cancelled.", part=_PART))
            task.cancel()

    def resume(self) -> int:
        """Begin to answer the requests that an earlier process accepted and did not answer. Returns their number."""
        left = self._store.queued(SAMPLE)
        for request in left:
            self.start(request)
        return len(left)

    async def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for running requests. Unfinished ones run again after the next start."""
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=timeout_s)
        left = [*self._running.values(), *self._loading.values()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _answer(self, stored: StoredRequest) -> None:
        try:
            asked = parsed(SampleRequest, stored.payload)
            sampler = self.get(stored.owner, stored.client)
            if sampler.checkpoint is not None:
                self._checkpoints.used(sampler.checkpoint, self._config.snapshot_kept_s)
            async with self._publications.hold(sampler.key, lambda: self._loaded(sampler)) as version:
                answer = await self._sample(stored.id, asked, version)
        except asyncio.CancelledError:
            raise  # it stays queued
        except WorkerDiedError as error:  # the service ends, and it runs after the next start
            _log.error("request %s waits for the next start: %s", stored.id, error)
        except Exception as error:  # noqa: BLE001 - the client gets it
            if await self._futures.service_is_ending(error):
                _log.error("request %s waits for the next start: %s", stored.id, error)
            else:
                self._futures.fail(stored.id, error)
        else:
            self._futures.finish(stored.id, answer, PROTOBUF)

    async def _loaded(self, sampler: Sampler) -> None:
        """Publish the weights of `sampler` to the replicas, once for all requests that wait for them."""
        key = sampler.key
        if key not in self._loading:
            self._loading[key] = task = asyncio.get_running_loop().create_task(self._load(sampler))
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        await asyncio.shield(self._loading[key])
        await asyncio.sleep(0)  # lets the done callback remove the task

    async def _sample(self, request: str, asked: SampleRequest, version: int | None) -> bytes:
        prompt, params = asked.prompt.tokens, asked.sampling_params
        room = self._base.max_length - len(prompt)
        if room < 1:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens leaves no room for a completion in {self._base.max_length}.",
                part=_PART,
            )
        stop_ids = self._base.eos_ids if params.stop_tokens is None else params.stop_tokens
        top_prompt = asked.topk_prompt_logprobs
        wants_prompt = bool(asked.prompt_logprobs) or top_prompt > 0
        calls = [
            {
                "temperature": params.temperature or 1.0,
                "greedy": params.temperature == 0,
                "top_k": max(0, params.top_k),
                "top_p": params.top_p,
                "stop_ids": stop_ids,
                "stop_strings": params.stop_strings,
                "adapter": version,
                "top_logprobs": asked.topk_sample_logprobs,
                "seed": params.seed_of(index),
                "prompt_logprobs": top_prompt if wants_prompt and index == 0 else None,
            }
            for index in range(asked.num_samples)
        ]
        completions = await self._generate(request, prompt, min(room, params.max_tokens or room), calls)
        self.tokens += sum(len(completion.token_ids) for completion in completions)
        first = completions[0]
        return sample_answer(
            [Sample(each.token_ids, each.logprobs, each.finish_reason, each.top_logprobs) for each in completions],
            prompt_logprobs=_last(first.prompt_logprobs, asked) if asked.prompt_logprobs else None,
            prompt_top=_last(first.top_prompt_logprobs, asked) if top_prompt else None,
            top_k=asked.topk_sample_logprobs,
            top_prompt_k=top_prompt,
        )

    async def _generate(
        self, request: str, prompt: Sequence[int], most: int, calls: Sequence[dict[str, Any]]
    ) -> list[Any]:
        """A completion for each of `calls`, each from the replica with the least load.

        Calls that a dying replica leaves unfinished are repeated on one other replica at a time, because they may be the cause.
        Raises `ConfigError` if too many have died of this request, `WorkerDiedError` if none is left.
        """
        found: dict[int, Any] = {}
        only = self._least() if self._store.deaths(request) else ""
        while len(found) < len(calls):
            left = [index for index in range(len(calls)) if index not in found]
            lost: set[str] = set()
            tried = await asyncio.gather(
                *(self._ask(only, lost, f"{request}:{index}", prompt, most, calls[index]) for index in left),
                return_exceptions=True,
            )
            for index, each in zip(left, tried, strict=True):
                if not isinstance(each, BaseException):
                    found[index] = each
                elif not (isinstance(each, WorkerDiedError) and lost):
                    raise each
            if not lost:
                break
            deaths = self._store.add_deaths(request, len(lost))
            if deaths >= _MOST_DEATHS:
                raise ConfigError(
                    f"{deaths} engines have died while they computed this request.",
                    part=_PART,
                    hint="It may be what they died of: the logs of the service's processes have the cause.",
                )
            only = self._least()
        return [found[index] for index in range(len(calls))]

    def _least(self) -> str:
        """The replica with the least load."""
        if not self._replicas:
            raise WorkerDiedError("no replica is left.", part=_PART, hint="Start the service again.")
        return min(self._replicas, key=lambda each: self._load_of[each])

    async def _ask(
        self, only: str, lost: set[str], name: str, prompt: Sequence[int], most: int, options: dict[str, Any]
    ) -> Any:
        """A completion from `only`, or from the replica with the least load. A replica that dies is added to `lost`."""
        replica = only if only in self._replicas else self._least()
        self._load_of[replica] += 1
        try:
            return await self._replicas[replica].generate(name, prompt, most, **options)
        except WorkerDiedError:
            self._replicas.pop(replica, None)
            lost.add(replica)
            raise
        finally:
            self._load_of[replica] -= 1


def _last(found: Sequence[_Entry | None], asked: SampleRequest) -> Sequence[_Entry | None]:
    """Entries for each prompt token, without those that the client asked to leave out."""
    left_out = 0 if asked.prompt_logprobs_last_n is None else len(found) - asked.prompt_logprobs_last_n
    return [None] * left_out + list(found[left_out:])
