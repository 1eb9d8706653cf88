"""`Decoding`: one request to a model of transformers, token by token."""

from __future__ import annotations

from typing import Any

import torch

from ...contract.answer import Answer
from ...contract.requests import GenerationRequest


class Decoding(Answer):
    """A request in progress, with the model's caches. `tokenizer` is needed for stop strings only."""

    def __init__(self, request: GenerationRequest, tokenizer: Any) -> None:
        super().__init__(request, tokenizer)
        self._cache: Any = None
        """The model's caches of all tokens but the last; None if they have to be computed."""

    def drop_cache(self) -> int:
        """Let the next step compute all tokens again; returns their number, 0 before the first step."""
        dropped = 0 if self._cache is None else len(self.ids)
        self._cache = None
        return dropped

    @torch.inference_mode()
    def step(self, model: Any, version: int) -> None:
        """Compute one more token with `model`, whose weights are `version`."""
        output = model(
            input_ids=torch.tensor([self.ids if self._cache is None else self.ids[-1:]], device=model.device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=0 if self.scores_prompt else 1,
        )
        self._cache = getattr(output, "past_key_values", None)
        self.add(output.logits[0], version)
