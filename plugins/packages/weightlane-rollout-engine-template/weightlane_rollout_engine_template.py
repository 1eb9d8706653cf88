"""A rollout engine: transformers on one thread, without caches, so that every step computes all tokens of a request again."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from weightlane.ckpt_engines import (
    ClosedError,
    CommitError,
    ConfigError,
    DeadlineExceededError,
    as_weightlane_error,
)
from weightlane.rollout import engine_toolkit as toolkit


class TemplateRolloutEngine(toolkit.RolloutEngine):
    """One rank. Everything that touches the model runs on one thread, so that an update comes between two steps."""

    capabilities = toolkit.RolloutCapabilities(summary="A template: transformers without caches.", keeps_caches=False)

    def __init__(self, name: str, config: toolkit.RolloutConfig, model_dir: str | os.PathLike[str]) -> None:
        super().__init__(name, config, model_dir)
        self._thread: ThreadPoolExecutor | None = None
        self._rank: toolkit.ReceivingRank | None = None
        self._model: Any = None
        self._tokenizer: Any = None
        self._version = self._serves = 0
        """The version of the model, and the one of the running update."""
        self._given_up = threading.Event()
        """Set once nobody waits for the running update any more."""
        self._in_flight: set[str] = set()

    @property
    def open(self) -> bool:
        """See `RolloutEngine.open`."""
        return self._rank is not None

    async def start(self, version: int) -> None:
        """See `RolloutEngine.start`."""
        self._thread, self._version = ThreadPoolExecutor(1, f"generate-{self.name}"), version
        limit = asyncio.timeout(self.config.start_limit_s)
        try:
            async with limit:
                loader = await self._on_thread(self._load)
        except BaseException as cause:
            self._thread.shutdown(wait=False)
            if limit.expired():
                raise DeadlineExceededError("the model took too long to load.", part=self.name) from cause
            raise
        group = toolkit.RankGroup(None)  # of one rank
        self._rank = toolkit.ReceivingRank(0, 1, group, loader.device)
        self._rank.updatable = toolkit.LiveWeights(loader, group)

    async def connect(self, fields: Mapping[str, Any]) -> None:
        """See `RolloutEngine.connect`."""
        rank = self._running()
        async with toolkit.connecting_within(self.config.connect_timeout_s, self.name):
            await self._on_thread(rank.connect, fields, lambda _: None)

    async def generate(self, request: toolkit.GenerationRequest, arrived: Callable[[int], None]) -> toolkit.Completion:
        """See `RolloutEngine.generate`. Steps of several requests take turns."""
        self._running()
        request = request.fitted(self.max_model_len, self.name)
        if request.sampling.stop_strings and self._tokenizer is None:
            load = partial(AutoTokenizer.from_pretrained, self.model_dir)
            self._tokenizer = await asyncio.to_thread(toolkit.tokenizer_for_stop_strings, load, self.name)
        answer, loop = toolkit.Answer(request, self._tokenizer), asyncio.get_running_loop()
        self._in_flight.add(request.key)
        try:
            while not answer.finish_reason and request.key in self._in_flight:
                arrived(await loop.run_in_executor(self._thread, self._step, answer))
        except Exception as error:  # a model's code may raise anything
            raise as_weightlane_error(error, self.name) from error
        finally:
            self._in_flight.discard(request.key)
        if not answer.finish_reason:
            raise ClosedError(f"request {request.request_id} was ended.", part=self.name)
        return answer.completion()

    async def update(self, fields: Mapping[str, Any], *, serves: int, trusted: bool) -> toolkit.UpdateFigures:
        """See `RolloutEngine.update`."""
        rank, given_up = self._running(), threading.Event()

        def update() -> float:
            began, self._serves, self._given_up = time.perf_counter(), serves, given_up
            rank.update(fields)
            return time.perf_counter() - began

        try:
            async with toolkit.updating_within(self.config.commit_timeout_s, self.name, trusted=trusted):
                blocked_s: float = await self._on_thread(update)
        finally:
            given_up.set()
        return toolkit.UpdateFigures(blocked_s, blocked_s)

    async def abort(self, keys: Collection[str]) -> None:
        """See `RolloutEngine.abort`."""
        self._in_flight.difference_update(keys)

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        rank, self._rank = self._rank, None
        if rank is None or self._thread is None:
            return
        self._in_flight.clear()
        self._given_up.set()
        await asyncio.to_thread(self._thread.shutdown)  # after the steps that are queued, which find nothing to do
        await asyncio.to_thread(rank.leave)
        self._model = None

    def serve(self, model: Any) -> None:
        """Serve `model` from the next step on. Raises an error if the update has been given up."""
        if self._given_up.is_set():
            raise CommitError(f"version {self._serves} came too late.", part=self.name)
        self._model, self._version = model, self._serves

    @torch.inference_mode()
    def _step(self, answer: toolkit.Answer) -> int:
        """Compute one token of a request, on the thread, unless it has been ended. Returns the number of new tokens."""
        if answer.request.key not in self._in_flight:
            return 0
        ids = torch.tensor([answer.ids], device=self._model.device)
        answer.add(self._model(input_ids=ids, use_cache=False).logits[0], self._version)
        return 1

    def _load(self) -> Loader:
        """Load the checkpoint, on the thread."""
        config = toolkit.read_config(self.model_dir, self.name)
        try:
            dtype = "auto" if self.config.dtype == "auto" else getattr(torch, self.config.dtype)
            self._model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=dtype).eval()
        except Exception as cause:  # as above
            raise ConfigError(f"transformers refuses {self.model_dir}: {cause}.", part=self.name) from cause
        text, longest = config.get_text_config(), self.config.max_model_len
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        self.max_model_len = min(longest, getattr(text, "max_position_embeddings", longest))
        self.vocab_size = text.vocab_size
        return Loader(self, self._model)

    def _running(self) -> toolkit.ReceivingRank:
        if self._rank is None:
            raise ClosedError("the replica is not running.", part=self.name)
        return self._rank

    async def _on_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)


class Loader(toolkit.RankLoader):
    """Loads each version as transformers loads a checkpoint, into a model of its own."""

    writes_atomically = True  # A version that fails has not touched the model that serves.

    def __init__(self, engine: TemplateRolloutEngine, model: Any) -> None:
        self.part, self.device = "rollout rank 0", model.device
        self._engine, self._like, self._written = engine, model, None
        tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
        self.expectation = toolkit.expectation_of(engine.model_dir, dtype=model.dtype, tied_embeddings=tied)

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `RankLoader.write`."""
        # Copies, since the tensors are in memory that is reused.
        state = {name: tensors[name].clone() for name in tensors}
        like = self._like
        self._written = type(like).from_pretrained(None, config=like.config, state_dict=state, dtype=like.dtype).eval()

    def settle(self) -> None:
        """See `RankLoader.settle`."""
        written, self._written = self._written, None
        self._engine.serve(written)
