"""The adapters in a saved training state: ``adapters.json`` and ``adapters.safetensors``, beside what the engine writes.

Tensors are whole, so any number of ranks in any layout can read them, and either engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError

from weightlane.ckpt_engines import ConfigError

from ...config import LoraConfig
from ..hf.partial_dir import storage_error
from .merged import merge_whole
from .sites import PART

_ABOUT, _TENSORS = "adapters.json", "adapters.safetensors"


@dataclass(frozen=True, slots=True)
class SavedAdapters:
    """The adapters of a training state."""

    about: Mapping[str, tuple[LoraConfig, int]] = field(default_factory=dict)
    """Configuration and steps of each adapter."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """float32 tensors by ``adapter|module|A|weight`` and the like."""
    published: str = ""
    """The adapter that is part of the published weights; empty for none."""

    def write(self, directory: Path) -> None:
        """Write both files, or none where there is no adapter."""
        from safetensors import SafetensorError  # noqa: PLC0415 - optional
        from safetensors.torch import save_file  # noqa: PLC0415 - optional

        if not self.about:
            return
        adapters = {name: {"config": config.model_dump(), "step": step} for name, (config, step) in self.about.items()}
        text = json.dumps({"published": self.published, "adapters": adapters}, indent=1)
        try:
            save_file(dict(self.tensors), directory / _TENSORS)
            (directory / _ABOUT).write_text(text, encoding="utf-8")
        except (SafetensorError, OSError) as cause:
            raise storage_error("written", directory, cause) from cause

    @classmethod
    def read(cls, directory: Path) -> SavedAdapters:
        """The adapters in the state in `directory`, none where it has none.

        Raises `ConfigError` for files that no engine wrote, `StorageError` for those that cannot be read.
        """
        from safetensors import SafetensorError  # noqa: PLC0415 - optional
        from safetensors.torch import load_file  # noqa: PLC0415 - optional

        try:
            about = json.loads((directory / _ABOUT).read_text(encoding="utf-8"))
            tensors = load_file(directory / _TENSORS)
            adapters = {
                str(name): (LoraConfig.model_validate(each["config"]), int(each["step"]))
                for name, each in about["adapters"].items()
            }
            return cls(adapters, tensors, str(about["published"]))
        except FileNotFoundError:
            return cls()
        except (SafetensorError, OSError) as cause:
            raise storage_error("read", directory, cause) from cause
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ValidationError) as cause:
            raise ConfigError(f"{directory / _ABOUT} is no list of adapters: {cause}.", part=PART) from cause

    @property
    def merged_names(self) -> set[str]:
        """The checkpoint tensors to which `merge_into` adds something."""
        keys = (key.split("|") for key in self.tensors)
        return {f"{module}.weight" for name, module, *_ in keys if name == self.published}

    def merge_into(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Add the published adapter to whole float32 weights by name, in place."""
        if self.published:
            prefix = f"{self.published}|"
            mine = {key.removeprefix(prefix): each for key, each in self.tensors.items() if key.startswith(prefix)}
            merge_whole(weights, mine, self.about[self.published][0].scale)
