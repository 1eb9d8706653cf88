"""`Sampling` and `GenerationRequest`: one request to a rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from weightlane.ckpt_engines import ConfigError

_SEEDS = 1 << 63
"""Seeds are below this: torch takes 64 signed bits, and a larger seed ends vLLM's engine."""
_TEMPERATURES = (0.01, 2.0)
"""vLLM refuses a higher temperature, and samples with 0.01 in place of a lower one, which a trainer would not know of."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one request are chosen, and which log-probabilities it wants.

    Log-probabilities of generated tokens are of the distribution that each was drawn from, with temperature, `top_k` and `top_p`
    applied: vLLM's ``processed_logprobs``. Those of the prompt are the model's own, at temperature 1.
    """

    max_new_tokens: int
    """Most tokens to generate. The longest request that the engine takes, prompt included, ends a completion, too."""
    temperature: float = 1.0
    """From 0.01 to 2; ignored with `greedy`."""
    stop_ids: Sequence[int] = ()
    """Token ids that end the completion. No other token does, not even the model's own end-of-sequence token."""
    stop_strings: Sequence[str] = ()
    """Texts that end the completion with the token that completes one of them. The text of special tokens counts. Needs the
    model's tokenizer."""
    top_k: int = 0
    """Sample from so many most probable tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the most probable tokens that have this share of the probability together, of what `top_k` leaves; above 0 and
    at most 1."""
    seed: int | None = None
    """Makes the sampling repeatable for fixed weights, from 0 to 2**63 - 1. An engine may refuse it."""
    greedy: bool = False
    """Take the most probable token; log-probabilities are then those at temperature 1, of all tokens."""
    prompt_logprobs: int | None = None
    """Number of most probable tokens to give with the log-probability of each prompt token, at most 20; None: no
    log-probabilities of the prompt. For them vLLM reads no prefix from its cache, and computes the complete prompt."""
    top_logprobs: int = 0
    """Number of most probable tokens to give with each generated one, at most 20."""

    def check(self, prompt_ids: Sequence[int], vocab_size: int, part: str) -> None:
        """Refuse what an engine without a tokenizer would only notice when it fails for all requests.

        Raises:
            ConfigError: A token is outside the vocabulary, the temperature is not one that every engine samples with, or the
                seed is no number from 0 to 2**63 - 1.
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


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """A version of an adapter that the ranks of a replica have loaded."""

    id: int
    """The engine's id of the adapter; 0 for no adapter. No two commits of a replica have the same, so that cached blocks
    of one are never taken for those of another."""
    version: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion that an engine generates."""

    key: str
    """Unique among the requests of a replica."""
    request_id: str
    """Name of the request in the answer; need not be unique."""
    prompt_ids: Sequence[int]
    """Token ids of the prompt."""
    sampling: Sampling
    cache_salt: str = ""
    """Cached prefixes are shared only by requests with the same salt; empty where the salt does not matter."""
    adapter: AdapterVersion | None = None
    """The adapter that computes the request from its first token to its last; None where versions are weights."""

    def fitted(self, max_model_len: int, part: str) -> Self:
        """Return the request with a completion that ends at `max_model_len` tokens of both, for engines that have no limit.

        Raises:
            ConfigError: The prompt is empty or leaves no room, no token is wanted, or `top_p` is not above 0 and at most 1.
        """
        sampling, room = self.sampling, max_model_len - len(self.prompt_ids)
        if not self.prompt_ids or sampling.max_new_tokens < 1 or room < 1:
            raise ConfigError(
                f"the prompt has {len(self.prompt_ids)} tokens and the completion up to {sampling.max_new_tokens}; there have to"
                f" be some of both, and the model takes {max_model_len} together.",
                part=part,
            )
        if not 0 < sampling.top_p <= 1:
            raise ConfigError(f"top_p is {sampling.top_p:g}, and has to be above 0 and at most 1.", part=part)
        return replace(self, sampling=replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room)))


def tokenizer_for_stop_strings(load: Callable[[], Any], part: str) -> Any:
    """Return the tokenizer that `load` makes of the model's files: for stop strings alone, since all else is token ids.

    Raises `ConfigError` if there is none.
    """
    try:
        tokenizer = load()
        # Where there are no files, transformers makes one that knows special tokens only.
        missing = "its files are missing" if len(tokenizer) <= len(tokenizer.all_special_ids) else ""
    except Exception as cause:  # noqa: BLE001 - it runs code of other packages, and of the model
        missing = str(cause)
    if missing:
        raise ConfigError(
            f"stop strings need the model's tokenizer: {missing}.",
            part=part,
            hint="Put its files into model.path, or stop at token ids.",
        )
    return tokenizer
