"""`Decoding`: one request to a model of transformers, token by token."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...contract.answer import Answer
from ...contract.records import Completion
from ...contract.requests import GenerationRequest
from .routed_experts import recorded_experts


class Decoding(Answer):
    """A request in progress, with the model's caches.

    `tokenizer` is needed for stop strings only. With `returns_experts`, completions have `Completion.routed_experts`.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Any, *, returns_experts: bool = False) -> None:
        super().__init__(request, tokenizer)
        self._cache: Any = None
        """The model's caches of all tokens but the last; None if they have to be computed."""
        self._experts: list[npt.NDArray[np.int16]] | None = [] if returns_experts else None
        """Those of the tokens that each step was the first to compute."""

    def drop_cache(self) -> int:
        """Let the next step compute all tokens again; returns their number, 0 before the first step."""
        dropped = 0 if self._cache is None else len(self.ids)
        self._cache = None
        return dropped

    @torch.inference_mode()
    def step(self, model: Any, version: int) -> None:
        """Compute one more token with `model`, whose weights are `version`."""
        read = self.ids if self._cache is None else self.ids[-1:]
        with nullcontext() if self._experts is None else recorded_experts(model, len(read)) as experts:
            output = model(
                input_ids=torch.tensor([read], device=model.device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=0 if self.scores_prompt else 1,
            )
        if self._experts is not None and experts is not None:
            new = len(self.ids) if not self._experts else 1  # others are computed again, for their caches
            self._experts.append(experts[-new:])
        self._cache = getattr(output, "past_key_values", None)
        self.add(output.logits[0], version)

    def completion(self) -> Completion:
        """See `Answer.completion`."""
        found = super().completion()
        return found if self._experts is None else replace(found, routed_experts=np.concatenate(self._experts))
