"""The answers of a rollout replica: plain, picklable data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Completion:
    """The generated part of one request."""

    request_id: str
    token_ids: list[int]
    """Generated tokens, the stop token included."""
    logprobs: list[float]
    """Log-probability of each token under the distribution it was drawn from, natural logarithm: temperature, top_k and top_p
    applied, so that the tokens left by them have probabilities that add up to 1."""
    versions: list[int]
    """The weight version that produced each token."""
    finish_reason: str
    """``"stop"`` (a stop token or a stop string) or ``"length"``."""
    prompt_logprobs: list[float | None] | None = None
    """Log-probability of each token of the prompt after those before it, by the model itself (temperature 1, all tokens); None
    for the first. None altogether if the request did not ask for them."""
    top_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    """The most probable tokens in the place of each token of the prompt, with their log-probabilities, best first; None for the
    first, and altogether if the request asked for none."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """The most probable tokens in the place of each generated one, with their log-probabilities as in `logprobs`, best first,
    without those that could not be drawn. None if the request asked for none."""
    cached_tokens: int | None = None
    """Tokens of the prompt whose keys and values the engine found in its cache. None if it does not say."""
    routed_experts: npt.NDArray[np.int16] | None = None
    """[tokens of prompt and completion - 1, decoder layers, experts per token]: the experts to which each token was routed when
    the model first read it, in the pass that led to the next token. The last token was not read. Layers without experts have
    any values. None unless `RolloutConfig.routed_experts` is set."""


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Running totals of one replica since it started."""

    version: int
    """The version that serves, or that served last."""
    serving: bool
    """Whether requests that name no adapter are accepted. False after a quarantine, or a commit that left a mixture, until the
    next commit; and before the first commit where versions are adapters, but requests for adapter 0 are accepted then."""
    requests: int
    """Completions returned."""
    tokens: int
    """Tokens generated, including those of failed requests."""
    in_flight: int
    """Requests generating now."""
    commits: int
    busy_s: float
    """Seconds in which at least one request was in flight."""
    blocked_s: float
    """Sum of `CommitReport.blocked_s`."""
    recomputed_tokens: int
    """Sum of `CommitReport.recomputed_tokens`."""
    max_token_gap_s: float
    """Longest wait for a next token that spans a commit, over all commits."""
    commit_gaps_s: dict[int, float] = field(default_factory=dict)
    """The longest wait for a next token that spans a commit, by committed version; of the last 1,000 versions."""
