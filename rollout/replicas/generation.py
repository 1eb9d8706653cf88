"""One request to a vLLM engine: sampling parameters in, token ids, log-probabilities and weight versions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weightlane.ckpt_engines import ClosedError, as_weightlane_error

from ..commit.records import Completion
from ..commit.token_clock import TokenClock
from .adapter_versions import AdapterVersion


@dataclass
class Generated:
    """The outputs of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: Any = None
    """The last output of vLLM; None if there was none."""
    version: int | None = None
    """The version of the adapter that generates; None where vLLM says which version of the weights does."""

    def completion(self, request_id: str, part: str) -> Completion:
        """The outputs as a completion; raises `ClosedError` if the request ended early."""
        if self.last is None or self.last.finish_reason not in ("stop", "length"):
            reason = "nothing" if self.last is None else self.last.finish_reason
            raise ClosedError(f"request {request_id} ended early ({reason}).", part=part)
        if self.version is not None:
            versions = [self.version] * len(self.token_ids)
        else:
            spans = self.last.weight_versions or ()
            versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
        if not len(self.token_ids) == len(self.logprobs) == len(versions):
            counts = f"{len(self.token_ids)} tokens, {len(self.logprobs)} logprobs, {len(versions)} versions"
            raise as_weightlane_error(AssertionError(counts), part)
        return Completion(request_id, self.token_ids, self.logprobs, versions, self.last.finish_reason)


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
    """Run one request to its end.

    Args:
        engine: vLLM's ``AsyncLLM``.
        key: A unique name for the request.
        prompt_ids: Token ids of the prompt.
        params: See `sampling_params`.
        cache_salt: Requests share cached prefixes only with requests of the same salt; empty for no salt.
        clock: Gets the arrival of every token.
        adapter: The adapter that the request computes with from its first token to its last; None for the weights alone.
    """
    prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
    if cache_salt:
        prompt["cache_salt"] = cache_salt
    generated = Generated(version=None if adapter is None else adapter.version)
    lora = None if adapter is None else adapter.request()
    async for output in engine.generate(prompt, params, request_id=key, lora_request=lora):
        (generated.last,) = output.outputs
        last = generated.last
        if last.token_ids:
            clock.arrived(key, len(last.token_ids))
            generated.token_ids += last.token_ids
            ranked = zip(last.token_ids, last.logprobs, strict=True)
            generated.logprobs += [logprobs[token].logprob for token, logprobs in ranked]
    return generated


def sampling_params(*, temperature: float, max_tokens: int, stop_token_ids: Sequence[int], seed: int | None) -> Any:
    """Sampling parameters for vLLM: a request ends at `stop_token_ids` or `max_tokens`, and nowhere else."""
    from vllm import SamplingParams  # noqa: PLC0415 - slow to import
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        stop_token_ids=list(stop_token_ids),
        seed=seed,
        ignore_eos=True,
        logprobs=0,  # Only the sampled token's.
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
