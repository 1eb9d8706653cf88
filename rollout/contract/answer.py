"""`Answer`: the completion of one request, for engines that have the logits of its tokens."""

from __future__ import annotations

import math
from typing import Any

import torch

from .records import Completion
from .requests import GenerationRequest

_Ranked = list[tuple[int, float]]


class Answer:
    """A completion in progress: chooses each token from its logits as `Sampling` says, and notes what the request asks for.

    `tokenizer`, one of transformers, is needed for stop strings only.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Any = None) -> None:
        self.request = request
        self.finish_reason = ""
        """Empty until the request has ended."""
        self.token_ids: list[int] = []
        """The tokens generated so far."""
        self._tokenizer = tokenizer
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._ranked: list[_Ranked] = []
        self._prompt: tuple[list[float | None], list[_Ranked | None]] | None = None
        self._random: torch.Generator | None = None

    @property
    def ids(self) -> list[int]:
        """The tokens of the prompt and those generated so far."""
        return [*self.request.prompt_ids, *self.token_ids]

    @property
    def scores_prompt(self) -> bool:
        """Whether the first `add` needs the logits of all tokens of the prompt."""
        return self.request.sampling.prompt_logprobs is not None and not self.token_ids

    def add(self, logits: torch.Tensor, version: int) -> None:
        """Choose the next token.

        Args:
            logits: Those after the last tokens, [tokens, vocabulary]: of the last one, or of the prompt if `scores_prompt`.
            version: Version of the weights that computed them.
        """
        logits, sampling = logits.float(), self.request.sampling
        if self.scores_prompt:
            self._score_prompt(logits[:-1])
        logprobs = self._distribution(logits[-1])
        if sampling.greedy:
            token = int(logprobs.argmax())
        else:
            if self._random is None:
                self._random = torch.Generator(logits.device)
                self._random.seed() if sampling.seed is None else self._random.manual_seed(sampling.seed)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=self._random))
        self.token_ids.append(token)
        self._logprobs.append(float(logprobs[token]))
        self._versions.append(version)
        if sampling.top_logprobs:
            self._ranked.append(_best(logprobs, sampling.top_logprobs))
        if token in sampling.stop_ids or self._has_stop_string():
            self.finish_reason = "stop"
        elif len(self.token_ids) >= sampling.max_new_tokens:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        """The request's answer, once it has ended."""
        of_prompt, top_of_prompt = self._prompt or (None, None)
        sampling = self.request.sampling
        return Completion(
            self.request.request_id,
            self.token_ids,
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
        text = self._tokenizer.decode(self.token_ids, skip_special_tokens=False)
        return any(string in text for string in strings)


def _best(logprobs: torch.Tensor, count: int) -> _Ranked:
    """The `count` most probable tokens with their log-probabilities, without those of probability 0."""
    found = logprobs.topk(min(count, len(logprobs)))
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [(token, logprob) for token, logprob in pairs if logprob > -math.inf]
