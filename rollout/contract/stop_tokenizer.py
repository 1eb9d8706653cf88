"""`tokenizer_for_stop_strings`: the model's tokenizer, which engines need for stop strings alone: all else is token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightlane.ckpt_engines import ConfigError


def tokenizer_for_stop_strings(load: Callable[[], Any], part: str) -> Any:
    """Return the tokenizer that `load` makes of the model's files. Raises `ConfigError` if there is none."""
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
