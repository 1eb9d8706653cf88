"""`Decoding`: one request to a model of transformers, token by token."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..contract.records import Completion
from ..contract.requests import GenerationRequest

_Ranked = list[tuple[int, float]]


class Decoding:
    """A request in progress. `tokenizer` is needed for stop strings only."""

    def __init__(self, request: GenerationRequest, tokenizer: Any) -> None:
        self.request = request
        self.finish_reason = ""
        """Empty until the request has ended."""
        self._tokenizer = tokenizer
        self._cache: Any = None
        """The model's caches of all tokens but the last; None if they have to be computed."""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._ranked: list[_Ranked] = []
        self._prompt: tuple[list[float | None], list[_Ranked | None]] | None = None
        self._random: torch.Generator | None = None

    def drop_cache(self) -> int:
        """Let the next step compute all tokens again; returns their number, 0 before the first step."""
        dropped = 0 if self._cache is None else len(self.request.prompt_ids) + len(self._token_ids)
        self._cache = None
        return dropped

    @torch.inference_mode()
    def step(self, model: Any, version: int) -> None:
        """Compute one more token with `model`, whose weights are `version`."""
        sampling, device = self.request.sampling, model.device
        ids = [*self.request.prompt_ids, *self._token_ids]
        fresh = ids if self._cache is None else ids[-1:]
        scores_prompt = sampling.prompt_logprobs is not None and not self._token_ids
        output = model(
            input_ids=torch.tensor([fresh], device=device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=0 if scores_prompt else 1,
        )
        self._cache = getattr(output, "past_key_values", None)
        logits = output.logits[0].float()
        if scores_prompt:
            self._score_prompt(logits[:-1])
        logprobs = self._distribution(logits[-1])
        if sampling.greedy:
            token = int(logprobs.argmax())
        else:
            if self._random is None:
                self._random = torch.Generator(device)
                self._random.seed() if sampling.seed is None else self._random.manual_seed(sampling.seed)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=self._random))
        self._token_ids.append(token)
        self._logprobs.append(float(logprobs[token]))
        self._versions.append(version)
        if sampling.top_logprobs:
            self._ranked.append(_best(logprobs, sampling.top_logprobs))
        if token in sampling.stop_ids or self._has_stop_string():
            self.finish_reason = "stop"
        elif len(self._token_ids) >= sampling.max_new_tokens:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        """The request's answer, once it has ended."""
        of_prompt, top_of_prompt = self._prompt or (None, None)
        sampling = self.request.sampling
        return Completion(
            self.request.request_id,
            self._token_ids,
            self._logprobs,
            self._versions,
            self.finish_reason,
            prompt_logprobs=of_prompt,
            top_prompt_logprobs=top_of_prompt if sampling.prompt_logprobs else None,
            top_logprobs=self._ranked if sampling.top_logprobs else None,
        )

    def _score_prompt(self, logits: torch.Tensor) -> None:
        """Note the log-probability of each token of the prompt; `logits` are float32, tokens - 1 times vocabulary."""
        logprobs, count = logits.log_softmax(-1), self.request.sampling.prompt_logprobs or 0
        of_tokens = zip(logprobs, self.request.prompt_ids[1:], strict=True)
        self._prompt = (
            [None, *(float(row[token]) for row, token in of_tokens)],
            [None, *(_best(row, count) for row in logprobs)],
        )

    def _distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the distribution that the next token is drawn from, float32 over the vocabulary."""
        sampling = self.request.sampling
        if sampling.greedy:
            return logits.log_softmax(-1)
        logits = logits / sampling.temperature
        if 0 < sampling.top_k < len(logits):
            logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -math.inf)
        if sampling.top_p < 1:
            ordered, order = logits.sort()
            below = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
            below[-1] = False  # The most probable token stays.
            logits = logits.masked_fill(torch.zeros_like(below).scatter(0, order, below), -math.inf)
        return logits.log_softmax(-1)

    def _has_stop_string(self) -> bool:
        strings = self.request.sampling.stop_strings
        if not strings:
            return False
        text = self._tokenizer.decode(self._token_ids, skip_special_tokens=False)
        return any(string in text for string in strings)


def _best(logprobs: torch.Tensor, count: int) -> _Ranked:
    """The `count` most probable tokens with their log-probabilities, without those of probability 0."""
    found = logprobs.topk(min(count, len(logprobs)))
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [(token, logprob) for token, logprob in pairs if logprob > -math.inf]
