"""A rollout engine: transformers on one thread, without caches, so that every step computes all tokens of a request again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from weightlane.ckpt_engines import (
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    as_weightlane_error,
)
from weightlane.rollout import engine_toolkit as toolkit


class TemplateRolloutEngine(toolkit.OneRankEngine):
    """One rank. Everything that touches the model runs on its thread, `updates`, so that an update comes between two steps."""

    capabilities = toolkit.RolloutCapabilities(summary="A template: transformers without caches.", keeps_caches=False)

    def __init__(self, name: str, config: toolkit.RolloutConfig, model_dir: str | os.PathLike[str]) -> None:
        super().__init__(name, config, model_dir)
        self._model: Any = None
        self._version = 0
        self._in_flight: set[str] = set()

    async def start(self, version: int) -> None:
        """See `RolloutEngine.start`."""
        late = DeadlineExceededError("the model took too long to load.", part=self.name)
        try:
            async with toolkit.limited(self.config.start_limit_s, late):
                loader = await self.in_thread(self.updates, self._load)
        except BaseException:
            await self.leave()
            raise
        self._version = version
        self.follow(loader)

    async def generate(self, request: toolkit.GenerationRequest, arrived: Callable[[int], None]) -> toolkit.Completion:
        """See `RolloutEngine.generate`. Steps of several requests take turns."""
        self.running()
        request = request.fitted(self.max_model_len, self.name)
        answer = toolkit.Answer(request, await self.tokenizer_for(request))
        self._in_flight.add(request.key)
        try:
            while not answer.finish_reason and request.key in self._in_flight:
                arrived(await self.in_thread(self.updates, self._step, answer))
        except Exception as error:  # a model's code may raise anything
            raise as_weightlane_error(error, self.name) from error
        finally:
            self._in_flight.discard(request.key)
        if not answer.finish_reason:
            raise ClosedError(f"request {request.request_id} was ended.", part=self.name)
        return answer.completion()

    def make_update(
        self, rank: toolkit.ReceivingRank, fields: Mapping[str, Any], update: toolkit.RunningUpdate
    ) -> None:
        """See `OneRankEngine.make_update`. No step is computed meanwhile."""
        began = time.perf_counter()
        super().make_update(rank, fields, update)
        blocked_s = time.perf_counter() - began
        update.figures = toolkit.UpdateFigures(blocked_s, blocked_s)

    async def abort(self, keys: Collection[str]) -> None:
        """See `RolloutEngine.abort`."""
        self._in_flight.difference_update(keys)

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._in_flight.clear()
        await self.leave()
        self._model = None

    def serve(self, model: Any) -> None:
        """Serve `model` from the next step on. Raises an error if the update has been given up."""
        self.updating.check(self.name)
        self._model, self._version = model, self.updating.serves

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
            model, found = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=dtype, output_loading_info=True)
        except Exception as cause:  # as above
            raise ConfigError(f"transformers refuses {self.model_dir}: {cause}.", part=self.name) from cause
        if missing := sorted(found["missing_keys"]):  # transformers would draw them at random
            raise ConfigError(f"{self.model_dir} lacks {len(missing)} tensors, such as {missing[0]}.", part=self.name)
        self._model = model.eval()
        text, longest = config.get_text_config(), self.config.max_model_len
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        self.max_model_len = min(longest, getattr(text, "max_position_embeddings", longest))
        self.vocab_size = text.vocab_size
        return Loader(self, self._model)


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
