"""One request to an SGLang server: the body of ``/generate``, and the answer in chunks."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from weightlane.ckpt_engines import ClosedError, ConfigError, ProtocolError, WeightlaneError

from ...contract.answer import Answer
from ...contract.http_calls import HttpCalls
from ...contract.records import Completion
from ...contract.requests import GenerationRequest

_Ranked = list[tuple[int, float]]
_BAD_REQUEST = 400


def body_of(request: GenerationRequest, rid: str, *, vocab_size: int, seeds: bool) -> dict[str, Any]:
    """The body of ``/generate``. `seeds` says whether the server draws by seeds: samples of one seed would be alike."""
    sampling = request.sampling
    narrowed = is_narrowed(request)
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "top_k": (sampling.top_k or vocab_size) if narrowed else -1,
        "ignore_eos": True,
    }
    if seeds:
        parameters["sampling_seed"] = secrets.randbits(62) if sampling.seed is None else sampling.seed
    return {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "sampling_params": parameters,
        "return_logprob": True,
        "logprob_start_len": -1 if sampling.prompt_logprobs is None else 0,
        "top_logprobs_num": max(sampling.top_logprobs, sampling.prompt_logprobs or 0),
        **({"return_sampling_mask": True, "sampling_logprobs_mode": "support"} if narrowed else {}),
    }


async def chunks_of(calls: HttpCalls, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """Post `body` to ``/generate``, and yield the chunks of the answer."""
    async with aclosing(calls.events("generate", {**body, "stream": True})) as events:
        async for event in events:
            if event.startswith(b"{"):  # the last one is no chunk
                yield calls.parsed("generate", event.decode())


def is_narrowed(request: GenerationRequest) -> bool:
    """Whether tokens are drawn from a part of the vocabulary."""
    sampling = request.sampling
    return not sampling.greedy and (sampling.top_k > 0 or sampling.top_p < 1)


class StreamedAnswer(Answer):
    """The answer to `request`, as far as it has arrived. `tokenizer` is needed for stop strings only."""

    def __init__(self, request: GenerationRequest, tokenizer: Any, part: str) -> None:
        super().__init__(request, tokenizer)
        self._part = part
        self._narrowed = is_narrowed(request)
        self._received = 0
        """Number of tokens that have arrived, those behind a stop token included."""
        self._of_prompt: Mapping[str, Any] = {}
        """The chunk that has the prompt's log-probabilities: after a commit they are computed again, and are others'."""
        self._last: Mapping[str, Any] = {}

    @property
    def stopped(self) -> bool:
        """Whether a stop token or a stop string has arrived: later tokens are dropped."""
        return self.finish_reason == "stop"

    @property
    def complete(self) -> bool:
        """Whether the last chunk has arrived."""
        return self._last.get("finish_reason") is not None

    def add_chunk(self, chunk: Mapping[str, Any]) -> int:
        """Take a chunk, and return the number of tokens that it adds. Raises the error that is in it."""
        if "error" in chunk:
            said = chunk["error"]
            raise self._refusal(said.get("code"), said.get("message"))
        self._last = meta = chunk["meta_info"]
        if not self._of_prompt and meta.get("input_token_logprobs"):
            self._of_prompt = meta
        before = len(self.token_ids)
        # Chunks have all tokens or the new ones alone, as the server was started, and the last chunk of an aborted request
        # has one token twice: their number is what counts.
        fresh = meta.get("completion_tokens", 0) - self._received
        self._received += max(0, fresh)
        for index in range(-fresh, 0):
            if not self.stopped:
                self._take(chunk["output_ids"][index], meta, index)
        return len(self.token_ids) - before

    def completion(self) -> Completion:
        """The completion, once it is `complete`. Raises `ClosedError` if the server has ended the request early."""
        reason, count = self._last.get("finish_reason") or {}, self.request.sampling.prompt_logprobs
        if not self.stopped and reason.get("type") == "abort":
            raise self._refusal(reason.get("status_code"), reason.get("message"))
        self._versions, self.finish_reason = self._stamps(), self.finish_reason or "length"
        if count is not None:
            scores, tops = (self._of_prompt.get(f"input_{kind}_logprobs") or () for kind in ("token", "top"))
            self._prompt = [entry[0] for entry in scores], [_best(each, count) if each else None for each in tops]
        return super().completion()

    def _take(self, token: int, meta: Mapping[str, Any], index: int) -> None:
        sampling = self.request.sampling
        if self._narrowed:
            support = dict(
                zip(
                    meta["output_token_sampling_mask"][index],
                    meta["output_token_sampling_logprobs"][index],
                    strict=True,
                )
            )
            logprob = support[token]
            ranked = sorted(support.items(), key=lambda pair: -pair[1])[: sampling.top_logprobs]
        else:
            logprob = meta["output_token_logprobs"][index][0]
            ranked = _best(meta["output_top_logprobs"][index], sampling.top_logprobs) if sampling.top_logprobs else []
        self.token_ids.append(token)
        self._logprobs.append(logprob)
        self._ranked.append(ranked)
        if token in sampling.stop_ids or self._has_stop_string():
            self.finish_reason = "stop"

    def _stamps(self) -> list[int]:
        """The version of each token."""
        spans = self._last.get("weight_versions")
        if spans is None:
            raise ConfigError(
                "this SGLang does not say which weights generated a token.",
                part=self._part,
                hint="Use a release that does, such as 0.5.23: meta_info.weight_versions.",
            )
        versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
        if len(versions) < len(self.token_ids):
            raise ProtocolError(
                f"SGLang says which weights generated {len(versions)} of {len(self.token_ids)} tokens.", part=self._part
            )
        return versions[: len(self.token_ids)]

    def _refusal(self, status: int | None, message: object) -> WeightlaneError:
        if status == _BAD_REQUEST:
            return ConfigError(f"SGLang refused the request: {message}", part=self._part)
        return ClosedError(f"request {self.request.request_id} ended early: {message}", part=self._part)


def _best(entries: Sequence[Sequence[Any]], count: int) -> _Ranked:
    """The first `count` of SGLang's lists of log-probability, token and text, but for tokens of probability 0."""
    # JSON has no infinity: SGLang writes null.
    return [(token, logprob) for logprob, token, *_ in entries[:count] if logprob is not None]
