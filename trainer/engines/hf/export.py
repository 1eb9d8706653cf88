"""Write a Hugging Face model directory that appears complete or not at all."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .partial_dir import discard_partial, make_partial, storage_error

_COPIED_SUFFIXES = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt"})


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A description of a model that is written as a Hugging Face directory."""

    model_dir: Path
    """Directory that tokenizer and configuration come from."""
    head: str
    """See ``TrainerConfig.head``."""
    dtype: torch.dtype
    """Dtype of floating-point weights."""
    kept: Collection[str] = ()
    """Names of weights that keep their own dtype."""


def write_model_dir(directory: Path, about: ExportedModel, write_weights: Callable[[Path, Any], None]) -> None:
    """Write config, tokenizer and weights under a temporary name next to `directory`, then rename it.

    Args:
        directory: must not exist.
        about: the model.
        write_weights: called with the temporary directory and the configuration; writes the safetensors files.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - optional
    from transformers import AutoConfig  # noqa: PLC0415 - optional, and slow to import
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415 - as above
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    )

    partial = make_partial(directory)
    try:
        for path in about.model_dir.iterdir():
            if path.is_file() and path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json"):
                shutil.copyfile(path, partial / path.name)
        config = copy.deepcopy(AutoConfig.from_pretrained(about.model_dir, local_files_only=True))
        config.dtype = about.dtype
        if about.head == "value":
            config.num_labels = 1
            config.architectures = [MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[config.model_type]]
        try:
            write_weights(partial, config)
        except SafetensorError as cause:  # safetensors raises this when the disk is full
            raise storage_error("written", directory, cause) from cause
        if (about.model_dir / "generation_config.json").is_file():
            shutil.copyfile(about.model_dir / "generation_config.json", partial / "generation_config.json")
        partial.rename(directory)
    except BaseException:
        discard_partial(directory)
        raise
