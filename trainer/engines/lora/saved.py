"""The adapters in a saved training state: ``adapters.json`` and ``adapters.safetensors``, next to the engine's own files.

Tensors are full, so either engine can read them with any number and layout of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError

from weightlane.ckpt_engines import ConfigError

from ...config import LoraConfig, TrainerConfig
from ..hf.checkpoint import CheckpointRun
from ..hf.partial_dir import storage_errors
from ..hf.training_state import check_state
from ..optimizers.settings import MOMENTS
from .sites import DEFAULT, PART

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
        """Write both files, or none if there is no adapter."""
        from safetensors.torch import save_file  # noqa: PLC0415 - optional

        if not self.about:
            return
        adapters = {name: {"config": config.model_dump(), "step": step} for name, (config, step) in self.about.items()}
        text = json.dumps({"published": self.published, "adapters": adapters}, indent=1)
        save_file(dict(self.tensors), directory / _TENSORS)
        (directory / _ABOUT).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> SavedAdapters:
        """Read the adapters of the state in `directory`; none if it has no such files.

        Raises `ConfigError` for files that no engine wrote or only one, `StorageError` for those that cannot be read.
        """
        from safetensors.torch import load_file  # noqa: PLC0415 - optional

        with storage_errors("read", directory):
            there = [name for name in (_ABOUT, _TENSORS) if (directory / name).exists()]
            if len(there) == 1:
                raise ConfigError(
                    f"the training state in {directory} is damaged: of {_ABOUT} and {_TENSORS} it has only {there[0]}.",
                    part=PART,
                    hint="Use another state.",
                )
            if not there:
                return cls()
            text = (directory / _ABOUT).read_bytes()
            tensors = load_file(directory / _TENSORS)
        try:
            about = json.loads(text)
            adapters = {
                str(name): (LoraConfig.model_validate(each["config"]), int(each["step"]))
                for name, each in about["adapters"].items()
            }
            return cls(adapters, tensors, str(about["published"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ValidationError) as cause:
            raise ConfigError(f"{directory / _ABOUT} is no list of adapters: {cause}.", part=PART) from cause

    def refuse_others(self, configs: Mapping[str, LoraConfig], published: str, directory: Path) -> None:
        """Raise `ConfigError` unless these adapters, read from `directory`, are those of an engine.

        `configs` are of the engine's trained adapters, of which `published` is part of its published weights; "" if none is.
        """
        saved = {name: config for name, (config, _) in self.about.items()}
        for name in sorted({*configs, *saved}):
            if name not in saved or name not in configs:
                without, with_ = ("state", "engine") if name in configs else ("engine", "state")
                raise ConfigError(
                    f"the training state in {directory} does not fit: the {with_} has an adapter {name!r}, the {without} none.",
                    part=PART,
                    hint="Give the engine the adapters of the state before load: by trainer.lora, or by add_adapter.",
                )
            if _shaping(configs[name]) != _shaping(saved[name]):
                raise ConfigError(
                    f"the training state in {directory} does not fit: its adapter {name!r} has {_shaping(saved[name])}, the"
                    f" engine's {_shaping(configs[name])}.",
                    part=PART,
                    hint="Use the configuration with which it was saved.",
                )
        if self.published != published:
            raise ConfigError(
                f"the training state in {directory} was saved {'with' if self.published else 'without'} trainer.lora.",
                part=PART,
                hint="Set trainer.lora as it was.",
            )

    def refuse_layers_beyond(self, known: Collection[str], directory: Path) -> None:
        """Raise `ConfigError` if one of these adapters, read from `directory`, is beside a layer that is not in `known`.

        An engine that has no adapters beside that layer would drop what was trained there.
        """
        for key in self.tensors:
            name, module, *_ = key.split("|")
            if module not in known:
                raise ConfigError(
                    f"the adapter {name!r} in {directory} is also beside {module}, beside which this engine has none.",
                    part=PART,
                    hint="Use the training engine that saved it.",
                )

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the full weight `name` with the published adapter added, in float32; as it is without one."""
        layer = f"{self.published}|{name.removesuffix('.weight')}"
        up, down = (self.tensors.get(f"{layer}|{matrix}|weight") for matrix in "BA")
        if not self.published or up is None or down is None:
            return weight
        return torch.add(weight, up @ down, alpha=self.about[self.published][0].scale)


def check_saved(
    state: Path,
    config: TrainerConfig,
    model: torch.nn.Module,
    runs: Sequence[CheckpointRun],
    moments_of: Callable[[str], Collection[str]] = lambda _: MOMENTS,
) -> None:
    """Raise the `ConfigError` with which a newly set up engine of `config` would refuse to load `state`.

    Reads headers, and the adapters. `model` may have its parameters on the meta device, and `runs` are its checkpoint tensors.
    `moments_of` returns the moments of a parameter by its in-memory name.
    """
    trained = {name for name, _ in model.named_parameters()} if config.trains_weights else ()
    moments = {run.name: moments_of(run.source) for run in runs if run.source in trained}
    check_state(state, {run.name: run.shape for run in runs}, moments)
    own = {} if config.lora is None or config.frozen else {DEFAULT: config.lora}
    SavedAdapters.read(state).refuse_others(own, "".join(own), state)


def _shaping(config: LoraConfig) -> Mapping[str, object]:
    """Return the settings that must not change between saving and loading."""
    return {"rank": config.rank, "alpha": config.alpha, "targets": sorted(config.targets)}
