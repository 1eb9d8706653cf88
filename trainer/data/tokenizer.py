"""Conversion between text and tokens of the trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError


class HfTokenizer:
    """A Hugging Face tokenizer as the loop uses one.

    With `begins`, prompts begin with the tokens that the tokenizer puts before a text, such as BOS, if it adds any. Conversations
    never do, because chat templates write their own.
    """

    def __init__(self, model_dir: Path, *, begins: bool = True) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._beginning = self._added_ahead() if begins else []

    def encode(self, text: str, *, within: bool = False) -> list[int]:
        """Return the token ids of a prompt; `within` a sequence, or of a conversation, without the beginning of a text."""
        return [*([] if within else self._beginning), *self._tokenized(text)["input_ids"]]

    def encode_with_places(self, text: str, *, chat: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a text as `encode` does, or of a conversation, and each token's range of characters."""
        try:
            found = self._tokenized(text, return_offsets_mapping=True)
        except NotImplementedError as cause:
            raise ConfigError(
                "the model's tokenizer cannot say where its tokens are in a text.",
                part="data",
                hint="Save it as a fast tokenizer (tokenizer.json).",
            ) from cause
        beginning = [] if chat else self._beginning
        return [*beginning, *found["input_ids"]], [*([(0, 0)] * len(beginning)), *found["offset_mapping"]]

    def as_chat(self, messages: Sequence[Mapping[str, Any]], *, answered: bool = False, **options: Any) -> str:
        """Format a conversation with the model's chat template, up to where its answer begins.

        With `answered`, up to the end of its last message. The template gets `options`, such as ``tools``. Raises `ConfigError`
        without a template, and for what it refuses.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError(
                "the model's tokenizer has no chat template.",
                part="data",
                hint="Give prompts as text (for weightlane train: data.chat = false), or add a template to it.",
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=not answered, tokenize=False, **options
                )
            )
        except Exception as cause:  # a template is a program of its own
            raise ConfigError(f"the chat template refuses {messages!r}: {cause}.", part="data") from cause

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion as the model wrote it, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _tokenized(self, text: str, **options: Any) -> Any:
        # Not verbose: transformers would warn of texts beyond model_max_length, and the run has a limit of its own.
        return self._tokenizer(text, add_special_tokens=False, verbose=False, **options)

    def _added_ahead(self) -> list[int]:
        """Return the special tokens that the tokenizer puts before a text."""
        special = set(self._tokenizer.all_special_ids)
        return list(takewhile(special.__contains__, self._tokenizer.encode("a", add_special_tokens=True)))
