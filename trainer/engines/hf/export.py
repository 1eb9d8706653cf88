"""Writing a Hugging Face model directory that appears complete or not at all."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .partial_dir import discard_partial, make_partial, storage_error

_COPIED_SUFFIXES = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt"})


def write_model_dir(
    directory: Path, model_dir: Path, dtype: torch.dtype, write_weights: Callable[[Path, Any], None]
) -> None:
    """Write config, tokenizer and weights under a temporary name beside `directory`, then rename it.

    Args:
        directory: must not exist.
        model_dir: where tokenizer and configuration come from.
        dtype: dtype of the weights, for the configuration.
        write_weights: called with the temporary directory and the configuration; writes the safetensors files.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - optional
    from transformers import AutoConfig  # noqa: PLC0415 - optional, and slow to import

    partial = make_partial(directory)
    try:
        for path in model_dir.iterdir():
            if path.is_file() and path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json"):
                shutil.copyfile(path, partial / path.name)
        config = copy.deepcopy(AutoConfig.from_pretrained(model_dir, local_files_only=True))
        config.dtype = dtype
        try:
            write_weights(partial, config)
        except SafetensorError as cause:  # what a full disk looks like from there
            raise storage_error("written", directory, cause) from cause
        if (model_dir / "generation_config.json").is_file():
            shutil.copyfile(model_dir / "generation_config.json", partial / "generation_config.json")
        partial.rename(directory)
    except BaseException:
        discard_partial(directory)
        raise
