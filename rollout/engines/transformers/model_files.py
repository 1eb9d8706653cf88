"""Reads the configuration in a model's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError


def read_config(model_dir: Path, part: str) -> Any:
    """Read a model's configuration. Raises `ConfigError` if transformers has no causal language model for it."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - an extra, and slow to import

    if not model_dir.is_dir():  # transformers would look for a repository of that name
        raise ConfigError(f"model directory {model_dir} does not exist.", part=part)
    try:
        config = AutoConfig.from_pretrained(model_dir)
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config)
    except (ValueError, OSError, ImportError, AttributeError, RuntimeError, KeyError) as cause:
        raise ConfigError(
            f"transformers does not load {model_dir}: {cause}.",
            part=part,
            hint="model.path is a directory with a causal language model in Hugging Face format.",
        ) from cause
    return config
