"""`TransformersEngine`: the rollout engine `transformers`, which generates in threads of the replica's process."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from weightlane.ckpt_engines import (
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    WeightlaneError,
    as_weightlane_error,
)

from ...commit.one_rank_engine import OneRankEngine
from ...config import RolloutConfig
from ...contract.engine import PlannedNeeds, RolloutCapabilities, UpdateFigures
from ...contract.limits import limited
from ...contract.records import Completion
from ...contract.requests import GenerationRequest
from .decoding import Decoding
from .loader import TransformersLoader
from .model_files import read_config
from .routed_experts import expert_modules

_CLOSE_TIMEOUT_S = 10.0
"""Most seconds that the running step may take to end."""


@dataclass
class _Request:
    """A request, and what waits for it on the event loop."""

    decoding: Decoding
    done: asyncio.Future[Completion]
    arrived: Callable[[int], None]


class TransformersEngine(OneRankEngine):
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
        self._computing = threading.Lock()
        """Held during a step, and while a new model takes the place of the old one."""
        self._steps = self._threads("generate")
        self._generating: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()

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

    async def start(self, version: int) -> None:
        """Load the model, and serve it as `version`."""
        limit_s = self.config.start_limit_s
        late = f"the model was not loaded within {limit_s:.0f} s."
        try:
            async with limited(
                limit_s, DeadlineExceededError(late, part=self.name, hint="Raise rollout.start_timeout_s.")
            ):
                loader = await self.in_thread(self.updates, self._load)
        except BaseException:
            await self.close()
            raise
        self.follow(loader)
        self._model, self._version = loader.model, version
        self._generating = asyncio.create_task(self._generate_all())

    async def generate(self, request: GenerationRequest, arrived: Callable[[int], None]) -> Completion:
        """Generate one completion."""
        self.running()
        request = request.fitted(self.max_model_len, self.name)
        tokenizer = await self.tokenizer_for(request)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        decoding = Decoding(request, tokenizer, returns_experts=self.config.routed_experts)
        self._requests[request.key] = _Request(decoding, done, arrived)
        self._woken.set()
        try:
            return await done
        finally:
            self._requests.pop(request.key, None)

    async def abort(self, keys: Collection[str]) -> None:
        """End requests in flight."""
        for key in list(keys):
            request = self._requests.pop(key, None)
            if request is not None and not request.done.done():
                request.done.set_exception(ClosedError(f"request {key} was ended.", part=self.name))

    async def close(self) -> None:
        """End the threads, and free the model."""
        await self.abort(list(self._requests))
        generating, self._generating = self._generating, None
        if generating is not None:
            generating.cancel()
        try:
            await self.leave()
            if generating is not None:
                await asyncio.wait([generating], timeout=_CLOSE_TIMEOUT_S)
        finally:
            self._model = None
            self._steps.shutdown(wait=False, cancel_futures=True)
            self._steps = self._threads("generate")

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

    def _put_into_service(self, model: Any) -> None:
        """Replace the model between two steps. Raises `CommitError` if nobody waits for the update any more."""
        with self._computing:
            began, update, recomputed = time.perf_counter(), self.updating, 0
            update.check(self.name)
            self._model, self._version = model, update.serves
            if self.config.kv_on_commit == "recompute":
                recomputed = sum(each.decoding.drop_cache() for each in list(self._requests.values()))
            blocked_s = time.perf_counter() - began
        update.figures = UpdateFigures(blocked_s, blocked_s, recomputed)

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
                    await self.in_thread(self._steps, self._step, request.decoding)
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
