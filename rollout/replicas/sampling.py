"""`Sampling`: how one request is sampled, checked before vLLM sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weightlane.ckpt_engines import ConfigError

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
        for token in (min(prompt_ids, default=0), max(prompt_ids, default=0)):
            if not 0 <= token < vocab_size:
                raise ConfigError(
                    f"the prompt has token {token}, and the model has tokens 0 to {vocab_size - 1}.", part=part
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
