"""Text and tokens of the model that is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError


class HfTokenizer:
    """A Hugging Face tokenizer as the loop uses one: no special tokens added to prompts, none shown in completions."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def as_chat(self, messages: Sequence[Mapping[str, Any]], *, answered: bool = False) -> str:
        """A conversation in the words of the model's chat template, up to where its answer begins.

        With `answered`, up to the end of its last message. Raises `ConfigError` without a template, and for what it refuses.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError(
                "the model's tokenizer has no chat template.",
                part="data",
                hint="Give prompts as text (for weightlane train: data.chat = false), or add a template to it.",
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=not answered, tokenize=False)
            )
        except Exception as cause:  # a template is a program of its own
            raise ConfigError(f"the chat template refuses {messages!r}: {cause}.", part="data") from cause

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
