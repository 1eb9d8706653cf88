"""One request to a vLLM engine: sampling parameters in, token ids, log-probabilities and weight versions out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightlane.ckpt_engines import ClosedError, as_weightlane_error

from ..contract.records import Completion
from ..contract.requests import AdapterVersion, GenerationRequest, Sampling


def vllm_params(sampling: Sampling) -> Any:
    """VLLM's ``SamplingParams``. The request ends at a stop token, a stop string or `max_new_tokens`, and nowhere else."""
    from vllm import SamplingParams  # noqa: PLC0415 - slow to import
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    return SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        max_tokens=sampling.max_new_tokens,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        stop_token_ids=list(sampling.stop_ids),
        stop=list(sampling.stop_strings),
        seed=sampling.seed,
        ignore_eos=True,
        logprobs=sampling.top_logprobs,  # The sampled token's are there in any case.
        prompt_logprobs=sampling.prompt_logprobs,
        detokenize=bool(sampling.stop_strings),
        skip_special_tokens=False,  # Their text can be a stop string, too.
        output_kind=RequestOutputKind.DELTA,
    )


@dataclass
class Generated:
    """The outputs of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranked: list[Mapping[int, Any]] = field(default_factory=list)
    """vLLM's ``Logprob`` objects for each token, by token id; empty if only those of sampled tokens were wanted."""
    prompt: Sequence[Mapping[int, Any] | None] = ()
    """vLLM's ``Logprob`` objects for each token of the prompt, by token id; None for the first."""
    last: Any = None
    """The last output of vLLM; None if there was none."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the prefix cache when the request was first scheduled."""
    version: int | None = None
    """The version of the adapter that generates; None where vLLM says which version of the weights does."""

    def completion(self, request: GenerationRequest, part: str) -> Completion:
        """The outputs as a completion; raises `ClosedError` if the request ended early."""
        request_id, prompt_ids, sampling = request.request_id, request.prompt_ids, request.sampling
        if self.last is None or self.last.finish_reason not in ("stop", "length"):
            reason = "nothing" if self.last is None else self.last.finish_reason
            raise ClosedError(f"request {request_id} ended early ({reason}).", part=part)
        if self.version is not None:
            versions = [self.version] * len(self.token_ids)
        else:
            spans = getattr(self.last, "weight_versions", None) or ()
            versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
        if not len(self.token_ids) == len(self.logprobs) == len(versions):
            counts = f"{len(self.token_ids)} tokens, {len(self.logprobs)} logprobs, {len(versions)} versions"
            raise as_weightlane_error(AssertionError(counts), part)
        experts = getattr(self.last, "routed_experts", None)
        if experts is not None and len(experts) != len(prompt_ids) + len(self.token_ids) - 1:
            counts = f"{len(prompt_ids)} and {len(self.token_ids)} tokens, {len(experts)} rows of experts"
            raise as_weightlane_error(AssertionError(counts), part)
        of_prompt: list[float | None] | None = None
        top_of_prompt: list[list[tuple[int, float]] | None] | None = None
        if sampling.prompt_logprobs is not None:
            if len(self.prompt) != len(prompt_ids):
                counts = f"{len(prompt_ids)} tokens in the prompt, {len(self.prompt)} logprobs"
                raise as_weightlane_error(AssertionError(counts), part)
            scored = list(zip(prompt_ids, self.prompt, strict=True))
            of_prompt = [None if ranked is None else ranked[token].logprob for token, ranked in scored]
            if count := sampling.prompt_logprobs:
                top_of_prompt = [None if ranked is None else _top(ranked, count) for _, ranked in scored]
        return Completion(
            request_id,
            self.token_ids,
            self.logprobs,
            versions,
            self.last.finish_reason,
            prompt_logprobs=of_prompt,
            top_prompt_logprobs=top_of_prompt,
            top_logprobs=[_top(ranked, count) for ranked in self.ranked] if (count := sampling.top_logprobs) else None,
            cached_tokens=self.cached_tokens,
            routed_experts=None if experts is None else experts.astype("int16"),
        )


def _top(ranked: Mapping[int, Any], count: int) -> list[tuple[int, float]]:
    """The `count` most probable tokens with their log-probabilities, without those of probability 0."""
    best = sorted((each.rank, token, each.logprob) for token, each in ranked.items())
    return [(token, logprob) for rank, token, logprob in best if rank <= count and logprob > -math.inf]


async def generate(engine: Any, request: GenerationRequest, arrived: Callable[[int], None], part: str) -> Completion:
    """Run a request on vLLM's ``AsyncLLM`` to its end; `arrived` gets the number of new tokens whenever there are some.

    Raises `ClosedError` if the request ended early.
    """
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_ids)}
    if request.cache_salt:
        prompt["cache_salt"] = request.cache_salt
    adapter, params = request.adapter, vllm_params(request.sampling)
    generated = Generated(version=None if adapter is None else adapter.version)
    async for output in engine.generate(prompt, params, request_id=request.key, lora_request=_lora_request(adapter)):
        generated.prompt = output.prompt_logprobs or generated.prompt  # All at once, with the first token.
        if (
            generated.cached_tokens is None
        ):  # A request that a commit preempts is looked up again, and finds others' tokens.
            generated.cached_tokens = output.num_cached_tokens
        (generated.last,) = output.outputs
        last = generated.last
        if last.token_ids:
            arrived(len(last.token_ids))
            generated.token_ids += last.token_ids
            if params.logprobs:
                generated.ranked += last.logprobs
            ranked = zip(last.token_ids, last.logprobs, strict=True)
            generated.logprobs += [logprobs[token].logprob for token, logprobs in ranked]
    return generated.completion(request, part)


def _lora_request(adapter: AdapterVersion | None) -> Any:
    """VLLM's ``LoRARequest`` for a request that computes with `adapter`; None for the weights without an adapter."""
    if adapter is None or not adapter.id:
        return None
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - slow to import

    # Nothing reads the path: the adapter is there before its first request. One that is not absolute, vLLM would download.
    return LoRARequest(f"weightlane-{adapter.id}", adapter.id, "/weightlane/has-no-files")
