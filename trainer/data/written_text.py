"""`WrittenText`: a completion as a reward function gets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class WrittenText(str):  # noqa: SLOT000 - a text cannot have slots with names
    """The text of a completion as the model wrote it, special tokens included, with its tokens and log-probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One log-probability for each token, under the rollout's policy."""

    def __new__(cls, text: str, token_ids: Sequence[int] = (), logprobs: Sequence[float] = ()) -> Self:
        """Make a text with its tokens."""
        made = super().__new__(cls, text)
        made.token_ids, made.logprobs = tuple(token_ids), tuple(logprobs)
        return made
