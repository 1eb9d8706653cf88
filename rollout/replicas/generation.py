"""One request to a vLLM engine: sampling parameters in, token ids, log-probabilities and weight versions out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightlane.ckpt_engines import ClosedError, ConfigError, as_weightlane_error

from ..commit.records import Completion
from ..commit.token_clock import TokenClock
from .adapter_versions import AdapterVersion

_SEEDS = 1 << 63
"""Seeds are below this: torch takes 64 signed bits, and a larger seed ends vLLM's engine."""
_TEMPERATURES = (0.01, 2.0)
"""vLLM refuses a higher temperature, and samples with 0.01 in place of a lower one, which a trainer would not know of."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options of one request: see `LocalReplica.generate`."""

    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    greedy: bool = False
    prompt_logprobs: int | None = None
    top_logprobs: int = 0

    def check(self, prompt_ids: Sequence[int], vocab_size: int, part: str) -> None:
        """Refuse what vLLM, which has no tokenizer here, would only notice when its engine fails for all requests.

        Raises:
            ConfigError: A token is outside the vocabulary, the temperature is not one that vLLM samples with, or the seed is no
                number from 0 to 2**63 - 1.
        """
        for tokens, what in ((prompt_ids, "the prompt"), (self.stop_ids, "stop_ids")):
            for token in (min(tokens, default=0), max(tokens, default=0)):
                if not 0 <= token < vocab_size:
                    raise ConfigError(
                        f"{what} has token {token}, and the model has tokens 0 to {vocab_size - 1}.", part=part
                    )
        lowest, highest = _TEMPERATURES
        if not self.greedy and not lowest <= self.temperature <= highest:
            raise ConfigError(
                f"the temperature is {self.temperature:g}, and has to be from {lowest:g} to {highest:g}.", part=part
            )
        if self.seed is not None and not 0 <= self.seed < _SEEDS:
            raise ConfigError(f"the seed is {self.seed}, and has to be from 0 to 2**63 - 1.", part=part)

    def params(self) -> Any:
        """VLLM's ``SamplingParams``. The request ends at a stop token, a stop string or `max_new_tokens`, and nowhere else."""
        from vllm import SamplingParams  # noqa: PLC0415 - slow to import
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        return SamplingParams(
            temperature=0.0 if self.greedy else self.temperature,
            max_tokens=self.max_new_tokens,
            top_k=self.top_k,
            top_p=self.top_p,
            stop_token_ids=list(self.stop_ids),
            stop=list(self.stop_strings),
            seed=self.seed,
            ignore_eos=True,
            logprobs=self.top_logprobs,  # The sampled token's are there in any case.
            prompt_logprobs=self.prompt_logprobs,
            detokenize=bool(self.stop_strings),
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
    version: int | None = None
    """The version of the adapter that generates; None where vLLM says which version of the weights does."""

    def completion(self, request_id: str, part: str, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """The outputs as a completion; raises `ClosedError` if the request ended early."""
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
        )


def _top(ranked: Mapping[int, Any], count: int) -> list[tuple[int, float]]:
    """The `count` most probable tokens with their log-probabilities, without those of probability 0."""
    best = sorted((each.rank, token, each.logprob) for token, each in ranked.items())
    return [(token, logprob) for rank, token, logprob in best if rank <= count and logprob > -math.inf]


async def generate(
    engine: Any,
    key: str,
    prompt_ids: Sequence[int],
    params: Any,
    *,
    cache_salt: str,
    clock: TokenClock,
    adapter: AdapterVersion | None = None,
) -> Generated:
    """Run one request, called `key`, on vLLM's ``AsyncLLM`` to its end; `params` are vLLM's.

    It shares cached prefixes only with requests of the same `cache_salt` (empty for none), and computes with `adapter`, if there
    is one, from its first token to its last. `clock` gets the arrival of every token.
    """
    prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
    if cache_salt:
        prompt["cache_salt"] = cache_salt
    generated = Generated(version=None if adapter is None else adapter.version)
    lora = None if adapter is None else adapter.request()
    async for output in engine.generate(prompt, params, request_id=key, lora_request=lora):
        generated.prompt = output.prompt_logprobs or generated.prompt  # All at once, with the first token.
        (generated.last,) = output.outputs
        last = generated.last
        if last.token_ids:
            clock.arrived(key, len(last.token_ids))
            generated.token_ids += last.token_ids
            if params.logprobs:
                generated.ranked += last.logprobs
            ranked = zip(last.token_ids, last.logprobs, strict=True)
            generated.logprobs += [logprobs[token].logprob for token, logprobs in ranked]
    return generated
