"""`TransformersEngine`: the rollout engine `transformers`, which generates in threads of the replica's process."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from weightlane.ckpt_engines import (
    ClosedError,
    CommitError,
    ConfigError,
    DeadlineExceededError,
    WeightlaneError,
    as_weightlane_error,
)

from ...commit.live_weights import LiveWeights
from ...commit.receiving_rank import ReceivingRank, connecting_within, updating_within
from ...config import RolloutConfig
from ...contract.engine import PlannedNeeds, RolloutCapabilities, RolloutEngine, UpdateFigures
from ...contract.rank_group import RankGroup
from ...contract.records import Completion
from ...contract.requests import GenerationRequest
from ...contract.stop_tokenizer import tokenizer_for_stop_strings
from .decoding import Decoding
from .loader import TransformersLoader
from .model_files import read_config
from .routed_experts import expert_modules

_CLOSE_TIMEOUT_S = 10.0
"""Most seconds that the running step may take to end, and the rank to leave its publisher."""


@dataclass
class _Request:
    """A request, and what waits for it on the event loop."""

    decoding: Decoding
    done: asyncio.Future[Completion]
    arrived: Callable[[int], None]


class TransformersEngine(RolloutEngine):
    """Models of transformers, one rank. One thread computes a token of each request in turn, another one makes updates."""

    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities(
        summary="Hugging Face's own models in the replica's process: any model, no vLLM, for small ones and for tests.",
        routed_experts=True,
    )

    def __init__(self, name: str, config: RolloutConfig, model_dir: str | os.PathLike[str]) -> None:
        super().__init__(name, config, model_dir)
        self._requests: dict[str, _Request] = {}
        """Requests in flight by key, oldest first."""
        self._model: Any = None
        """The model that serves; None before `start` and after `close`."""
        self._version = 0
        self._serves = 0
        """The version that `_model` is once the running update has succeeded."""
        self._given_up = threading.Event()
        """Set once nobody waits for the running update any more: it must not take effect then."""
        self._computing = threading.Lock()
        """Held during a step, and while a new model takes the place of the old one."""
        self._threads: ThreadPoolExecutor | None = None
        self._updates: ThreadPoolExecutor | None = None
        self._running: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._rank: ReceivingRank | None = None
        self._blocked_s, self._recomputed = 0.0, 0
        self._tokenizer: Any = None

    @classmethod
    def check(cls, config: RolloutConfig, model_dir: Path) -> str:
        """Refuse a model that transformers does not have, or one without the experts that completions are to have."""
        found = read_config(model_dir, "rollout")
        if config.routed_experts:
            from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an extra, and slow to import

            with torch.device("meta"):
                expert_modules(AutoModelForCausalLM.from_config(found), "rollout")
        return ""

    @classmethod
    def planned_needs(cls, config: RolloutConfig, model_dir: Path) -> PlannedNeeds:
        """The one rank asks for whole tensors."""
        dtype = read_config(model_dir, "rollout").dtype if config.dtype == "auto" else config.dtype
        return PlannedNeeds((None,), str(dtype or "float32").removeprefix("torch."), "transformers loads whole tensors")

    @classmethod
    def environment(cls, config: RolloutConfig) -> dict[str, str]:
        """The number of threads that compute."""
        return {"OMP_NUM_THREADS": str(config.threads_per_rank)}

    @property
    def open(self) -> bool:
        """Whether the engine was started and not closed."""
        return self._rank is not None

    async def start(self, version: int) -> None:
        """Load the model, and serve it as `version`."""
        self._threads = ThreadPoolExecutor(1, f"weightlane-generate-{self.name}")
        self._updates = ThreadPoolExecutor(1, f"weightlane-update-{self.name}")
        try:
            async with asyncio.timeout(self.config.start_limit_s):
                loader = await self._in(self._updates, self._load)
        except BaseException as cause:
            self._threads.shutdown(wait=False)
            self._updates.shutdown(wait=False)
            if isinstance(cause, TimeoutError) and not isinstance(cause, WeightlaneError):
                raise DeadlineExceededError(
                    f"the model was not loaded within {self.config.start_limit_s:.0f} s.",
                    part=self.name,
                    hint="Raise rollout.start_timeout_s.",
                ) from cause
            raise
        group = RankGroup(None)
        self._rank = ReceivingRank(0, 1, group, loader.device)
        self._rank.updatable = LiveWeights(loader, group)
        self._model, self._version = loader.model, version
        self._running = asyncio.create_task(self._generate_all())

    async def connect(self, fields: Mapping[str, Any]) -> None:
        """Subscribe to the publisher in `fields`."""
        rank = self._open_rank()
        async with connecting_within(self.config.connect_timeout_s, self.name):
            await self._in(self._updates, rank.connect, fields, lambda _: None)

    async def generate(self, request: GenerationRequest, arrived: Callable[[int], None]) -> Completion:
        """Generate one completion."""
        self._open_rank()
        request = request.fitted(self.max_model_len, self.name)
        if request.sampling.stop_strings and self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(self._load_tokenizer)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        decoding = Decoding(request, self._tokenizer, returns_experts=self.config.routed_experts)
        self._requests[request.key] = _Request(decoding, done, arrived)
        self._woken.set()
        try:
            return await done
        finally:
            self._requests.pop(request.key, None)

    async def update(self, fields: Mapping[str, Any], *, serves: int, trusted: bool) -> UpdateFigures:
        """Load a version beside the model that serves, and let it take that one's place between two steps."""
        rank, given_up = self._open_rank(), threading.Event()
        try:
            async with updating_within(self.config.commit_timeout_s, self.name, trusted=trusted):
                figures: UpdateFigures = await self._in(self._updates, self._update, rank, fields, serves, given_up)
                return figures
        finally:
            given_up.set()

    async def abort(self, keys: Collection[str]) -> None:
        """End requests in flight."""
        for key in list(keys):
            request = self._requests.pop(key, None)
            if request is not None and not request.done.done():
                request.done.set_exception(ClosedError(f"request {key} was ended.", part=self.name))

    async def close(self) -> None:
        """End the threads, and free the model."""
        rank, self._rank = self._rank, None
        if rank is None:
            return
        self._given_up.set()
        await self.abort(list(self._requests))
        assert self._running is not None, "started"
        self._running.cancel()
        await asyncio.wait([self._running], timeout=_CLOSE_TIMEOUT_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(rank.leave), _CLOSE_TIMEOUT_S)
        self._model = None
        for threads in (self._threads, self._updates):
            assert threads is not None, "started"
            threads.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> TransformersLoader:
        dtype = None if self.config.dtype == "auto" else getattr(torch, self.config.dtype)
        try:
            loader = TransformersLoader(self.model_dir, dtype, "rollout rank 0", self._put_into_service)
        except (ValueError, OSError, RuntimeError, KeyError) as cause:
            if isinstance(cause, WeightlaneError):
                raise
            raise ConfigError(f"transformers refuses {self.model_dir}: {cause}.", part=self.name) from cause
        if self.config.routed_experts:
            expert_modules(loader.model, self.name)
        text = loader.config.get_text_config()
        self.dtype = str(loader.model.dtype).removeprefix("torch.")
        self.max_model_len = min(
            self.config.max_model_len, int(getattr(text, "max_position_embeddings", 0) or self.config.max_model_len)
        )
        self.vocab_size = int(text.vocab_size)
        return loader

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer  # noqa: PLC0415 - only stop strings need one

        return tokenizer_for_stop_strings(partial(AutoTokenizer.from_pretrained, self.model_dir), self.name)

    def _update(
        self, rank: ReceivingRank, fields: Mapping[str, Any], serves: int, given_up: threading.Event
    ) -> UpdateFigures:
        """See `update`, which waits for this until it gives up."""
        recomputed, self._blocked_s = self._recomputed, 0.0
        self._serves, self._given_up = serves, given_up
        rank.update(fields)
        return UpdateFigures(self._blocked_s, self._blocked_s, self._recomputed - recomputed)

    def _put_into_service(self, model: Any) -> None:
        """Replace the model between two steps. Raises `CommitError` if nobody waits for the update any more."""
        with self._computing:
            began = time.perf_counter()
            if self._given_up.is_set():
                raise CommitError(f"version {self._serves} came too late.", part=self.name)
            self._model, self._version = model, self._serves
            if self.config.kv_on_commit == "recompute":
                self._recomputed += sum(each.decoding.drop_cache() for each in list(self._requests.values()))
            self._blocked_s = time.perf_counter() - began

    async def _generate_all(self) -> None:
        """Compute tokens as long as there are requests, until cancelled."""
        while True:
            self._woken.clear()
            requests = [each for each in self._requests.values() if not each.done.done()][: self.config.max_num_seqs]
            if not requests:
                await self._woken.wait()
                continue
            for request in requests:
                try:
                    await self._in(self._threads, self._step, request.decoding)
                except Exception as error:  # noqa: BLE001 - the models' code may raise anything
                    if not request.done.done():
                        request.done.set_exception(as_weightlane_error(error, self.name))
                if request.done.done():
                    continue
                request.arrived(1)
                if request.decoding.finish_reason:
                    request.done.set_result(request.decoding.completion())

    def _step(self, decoding: Decoding) -> None:
        with self._computing:
            if self._model is not None:
                decoding.step(self._model, self._version)

    def _open_rank(self) -> ReceivingRank:
        if self._rank is None:
            raise ClosedError("the replica is not running.", part=self.name)
        return self._rank

    @staticmethod
    async def _in(threads: ThreadPoolExecutor | None, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, call, *arguments)
