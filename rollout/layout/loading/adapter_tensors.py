"""The layers that a low-rank adapter is beside, the tensors of a version of it, and models that cannot have one.

Only headers of the checkpoint's files are read.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.sync import Expectation, ExpectedTensor

from ...config import AdapterConfig
from .expectation import stored_tensors

PUBLISH = "trainer.lora.publish"
"""The setting by which versions are adapters."""
_PART = "rollout adapter"
_MERGED = f'Set {PUBLISH} to "merged": rollouts then get the weights with the adapter added.'
_IN_DECODER_LAYER = re.compile(r"(?P<module>.+\.\d+\..+)\.weight")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MATRIX = 2
"""Dimensions of a linear layer's weight; norms have one."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's ``max_lora_rank``."""


def adapted_layers(model: str | os.PathLike[str], adapter: AdapterConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every layer that an adapter is beside, by its Hugging Face name.

    Args:
        model: Checkpoint directory.
        adapter: The adapter.

    Raises:
        ConfigError: The model cannot be served with such an adapter, or its files cannot be read.
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
        raise ConfigError(f"{model} has no linear layers inside decoder layers.", part=_PART, hint=_MERGED)
    return {
        module: shape for module, shape in layers.items() if not adapter.targets or _leaf(module) in adapter.targets
    }


def adapter_expectation(layers: dict[str, tuple[int, int]], rank: int, dtype: torch.dtype) -> Expectation:
    """The tensors of a version: A and B of every layer under PEFT's names, in `dtype` or in float32."""
    dtypes = frozenset({dtype, torch.float32})
    tensors = {}
    for module, (rows, columns) in layers.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = ExpectedTensor((rank, columns), dtypes)
        tensors[f"base_model.model.{module}.lora_B.weight"] = ExpectedTensor((rows, rank), dtypes)
    return Expectation(tensors)


def adapter_elements(model: str | os.PathLike[str], adapter: AdapterConfig) -> int:
    """Number of elements of a version. Raises as `adapted_layers`."""
    return sum(adapter.rank * (rows + columns) for rows, columns in adapted_layers(model, adapter).values())


def max_rank(adapter: AdapterConfig) -> int:
    """The smallest ``max_lora_rank`` with which vLLM takes the adapter. Raises `ConfigError` if there is none."""
    for rank in _RANKS:
        if rank >= adapter.rank:
            return rank
    raise ConfigError(
        f"trainer.lora.rank is {adapter.rank}, and vLLM has adapters of at most {_RANKS[-1]}.", part=_PART, hint=_MERGED
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
    if any((section.get(key) or 0) > 1 for section in sections for key in _EXPERTS):
        reason = "has experts, beside which a version can have no adapter"
    if reason:
        raise ConfigError(f"{directory} {reason}, but {PUBLISH} is adapter.", part=_PART, hint=_MERGED)


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]
