"""Text and tokens of the model that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class HfTokenizer:
    """A Hugging Face tokenizer as the loop uses one: no special tokens added to prompts, none shown in completions."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
