"""The layers that a low-rank adapter is for, the tensors of a version of it, and models that cannot have one.

Only headers of the checkpoint's files are read.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import CommitError, ConfigError
from weightlane.sync import Expectation, ExpectedTensor

from ...config import AdapterConfig
from .checkpoint_expectation import stored_tensors
from .refused_models import has_experts

PUBLISH = "trainer.lora.publish"
"""The setting by which versions are adapters."""
_PART = "rollout adapter"
_PREFIX = "base_model.model."
"""Begin of PEFT's names."""
MERGED = f'Set {PUBLISH} to "merged": rollouts then get the weights with the adapter added.'
_IN_DECODER_LAYER = re.compile(r"(?P<module>.+\.\d+\..+)\.weight")
_MATRIX = 2
"""Dimensions of a linear layer's weight; norms have one."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's ``max_lora_rank``."""


def adapted_layers(model: str | os.PathLike[str], adapter: AdapterConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every layer that an adapter for the checkpoint in `model` is for, by its Hugging Face name.

    Raises `ConfigError` if the model cannot be served with such an adapter, or its files cannot be read.
    """
    _refuse_model(Path(model))
    max_rank(adapter)
    layers = {}
    for name, (shape, _) in stored_tensors(model).items():
        match = _IN_DECODER_LAYER.fullmatch(name)
        if match is not None and len(shape) == _MATRIX:
            layers[match["module"]] = (shape[0], shape[1])
    known = sorted({_leaf(module) for module in layers})
    for target in adapter.targets:
        if target not in known:
            near = difflib.get_close_matches(target, known, n=1)
            raise ConfigError(
                f"{model} has no linear layer {target!r} in its decoder layers, which trainer.lora.targets names.",
                part=_PART,
                hint=(f"Did you mean {near[0]!r}? " if near else "") + f"It has {', '.join(known) or 'none'}.",
            )
    if not layers:
        raise ConfigError(f"{model} has no linear layers inside decoder layers.", part=_PART, hint=MERGED)
    return {
        module: shape for module, shape in layers.items() if not adapter.targets or _leaf(module) in adapter.targets
    }


def adapter_expectation(layers: dict[str, tuple[int, int]], rank: int, dtype: torch.dtype) -> Expectation:
    """The tensors of a version: A and B of every layer under PEFT's names, in `dtype` or in float32."""
    dtypes = frozenset({dtype, torch.float32})
    tensors = {}
    for module, (rows, columns) in layers.items():
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = ExpectedTensor((rank, columns), dtypes)
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = ExpectedTensor((rows, rank), dtypes)
    return Expectation(tensors)


def announced_layers(layers: Collection[str], sent: AdapterConfig, announced: AdapterConfig) -> frozenset[str]:
    """The layers, among `layers`, that an announced adapter is for; all of them if it names no targets.

    `sent` is the adapter that every version is sent as. Raises `ConfigError` if `announced` has a higher rank, or targets that
    are not sent.
    """
    if announced.rank > sent.rank:
        raise ConfigError(
            f"the announced adapter has rank {announced.rank}, and versions have {sent.rank}.",
            part=_PART,
            hint="Set trainer.lora.rank to the highest rank of any adapter.",
        )
    known = {_leaf(module) for module in layers}
    if unknown := sorted(set(announced.targets) - known):
        raise ConfigError(
            f"the announced adapter is for {unknown[0]!r}, and versions are not.",
            part=_PART,
            hint=f"Versions have {', '.join(sorted(known))}: see trainer.lora.targets.",
        )
    return frozenset(module for module in layers if not announced.targets or _leaf(module) in announced.targets)


def announced_tensors(
    tensors: Mapping[str, torch.Tensor], adapted: Collection[str], rank: int
) -> dict[str, torch.Tensor]:
    """The tensors of an announced adapter: views of those of a version, which is padded with zeros.

    Args:
        tensors: A of shape [rank that is sent, inputs] and B of shape [outputs, rank that is sent] by PEFT's names.
        adapted: The layers that the adapter is for.
        rank: The adapter's rank: as many rows of A and columns of B are its own.

    Raises:
        CommitError: A number that would be left out is not zero, so the version is another adapter than was announced.
    """
    own = {}
    for name, tensor in tensors.items():
        module, _, matrix = name.removesuffix(".weight").removeprefix(_PREFIX).rpartition(".")
        dim = 0 if matrix == "lora_A" else 1
        size = rank if module in adapted else 0
        if tensor.narrow(dim, size, tensor.shape[dim] - size).any():
            raise CommitError(
                f"{name} is not zero where the announced adapter has nothing.",
                part=_PART,
                hint="Announce the rank and the targets of the adapter that is published.",
            )
        if size:
            own[name] = tensor.narrow(dim, 0, size)
    return own


def adapter_elements(model: str | os.PathLike[str], adapter: AdapterConfig) -> int:
    """Number of elements of a version. Raises as `adapted_layers`."""
    return sum(adapter.rank * (rows + columns) for rows, columns in adapted_layers(model, adapter).values())


def max_rank(adapter: AdapterConfig) -> int:
    """The smallest ``max_lora_rank`` with which vLLM takes the adapter. Raises `ConfigError` if there is none."""
    for rank in _RANKS:
        if rank >= adapter.rank:
            return rank
    raise ConfigError(
        f"trainer.lora.rank is {adapter.rank}, and vLLM has adapters of at most {_RANKS[-1]}.", part=_PART, hint=MERGED
    )


def engine_arguments_of(model: str | os.PathLike[str], adapter: AdapterConfig, slots: int) -> dict[str, Any]:
    """VLLM's arguments for a replica whose versions are adapters. Raises as `adapted_layers`."""
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_lora_rank": max_rank(adapter),
        # Versions are dropped when nothing uses them. vLLM would drop the one that was used least recently, which may be in use.
        "max_cpu_loras": slots + (1 << 20),
        "lora_target_modules": sorted({_leaf(module) for module in adapted_layers(model, adapter)}),
    }


def _refuse_model(directory: Path) -> None:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # vLLM refuses a broken config when it loads the model
    sections = [section for section in (config, config.get("text_config")) if isinstance(section, dict)]
    reason = ""
    if any(section.get("quantization_config") for section in sections):
        reason = "is quantised, which changes what an adapter is added to"
    if any(map(has_experts, sections)):
        reason = "has experts, for which a version can have no adapter"
    if reason:
        raise ConfigError(f"{directory} {reason}, but {PUBLISH} is adapter.", part=_PART, hint=MERGED)


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]
