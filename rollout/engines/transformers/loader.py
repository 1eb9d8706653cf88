"""`TransformersLoader`: loads each version as transformers loads a checkpoint, into a new model that replaces the old one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from weightlane.ckpt_engines import ConfigError

from ...contract.loader import RankLoader
from ...layout.loading.checkpoint_expectation import expectation_of
from .model_files import read_config


class TransformersLoader(RankLoader):
    """The models of one replica.

    Args:
        model_dir: Hugging Face checkpoint directory.
        dtype: The dtype to compute in; None: that of the checkpoint.
        part: Name of the rank in errors.
        replace: Called with each new model, to put it into service; raises if it must not be any more.

    Raises:
        ConfigError: transformers has no such causal language model, or the checkpoint lacks some of its tensors.
    """

    writes_atomically = True

    def __init__(self, model_dir: Path, dtype: torch.dtype | None, part: str, replace: Callable[[Any], None]) -> None:
        self.part = part
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.config = read_config(model_dir, part)
        self._replace = replace
        self._next: Any = None
        """The model of the version that was written last, until it serves."""
        self._dtype = dtype
        self.model = self._load(model_dir, None)
        """The model of the checkpoint."""
        text = self.config.get_text_config()
        self.expectation = expectation_of(
            model_dir, dtype=self.model.dtype, tied_embeddings=bool(getattr(text, "tie_word_embeddings", False))
        )

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the model of a version. The one that serves does not change."""
        # Copies: a model may keep the tensors that it is given, and these are borrowed.
        self._next = self._load(None, {name: tensors[name].clone() for name in tensors})

    def settle(self) -> None:
        """Put the model that was written into service."""
        model, self._next = self._next, None
        self._replace(model)

    def _load(self, model_dir: Path | None, tensors: Mapping[str, torch.Tensor] | None) -> Any:
        transformers_logging.disable_progress_bar()  # one per version
        dtype = "auto" if self._dtype is None and model_dir is not None else self._dtype or self.model.dtype
        # Without a directory, the class that is chosen automatically looks for files all the same.
        source: Any = AutoModelForCausalLM if model_dir is not None else type(self.model)
        model, found = source.from_pretrained(
            model_dir, config=self.config, state_dict=tensors, dtype=dtype, output_loading_info=True
        )
        if missing := sorted(found["missing_keys"]):  # transformers would draw them at random
            raise ConfigError(
                f"the checkpoint lacks {len(missing)} tensors of {type(model).__name__}, such as {missing[0]}.",
                part=self.part,
                hint="Use a complete checkpoint of a causal language model.",
            )
        return model.to(self.device).eval()
