"""Completions that were cut off at their greatest length, and the penalty for long ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...objectives.config import AlgorithmConfig
from ..protocols import Trajectory


def overlong_places(
    episodes: Sequence[Trajectory], stop_token_ids: Collection[int], max_new_tokens: int, max_model_len: int
) -> list[int]:
    """Return the places of episodes that end without a stop token, with `max_new_tokens`, or `max_model_len` if not 0 in all."""
    last = [(episode, episode.turns[-1].completion.token_ids) for episode in episodes]
    return [
        place
        for place, (episode, written) in enumerate(last)
        if written[-1] not in stop_token_ids
        and (len(written) >= max_new_tokens or 0 < max_model_len <= len(episode.current.whole))
    ]


def length_penalty(tokens: int, algorithm: AlgorithmConfig) -> float:
    """Return what a completion's reward is changed by for its length (DAPO, arXiv 2503.14476, equation 13), 0 or less.

    With L = max_new_tokens and B = overlong_buffer, it falls from 0 at L - B tokens to -overlong_penalty at L. No completion is
    longer. 0 unless ``overlong`` is ``penalty``.
    """
    if algorithm.overlong != "penalty":
        return 0.0
    beyond = tokens - (algorithm.max_new_tokens - algorithm.overlong_buffer)
    return -algorithm.overlong_penalty * max(0, beyond) / algorithm.overlong_buffer
