"""Build the model of an `Fsdp2Engine` without weights, and refuse a configuration that its layers do not support."""

from __future__ import annotations

from pathlib import Path

import torch

from ...config import TrainerConfig
from ..hf.causal_head import causal_head
from ..hf.value_head import value_head
from .loading import model_without_weights, refuse_other_weights
from .lora import check_adapter
from .mesh import check_mesh, parallel_styles


def checked_model(config: TrainerConfig, model_dir: Path) -> torch.nn.Module:
    """Return the model in `model_dir` with its parameters on the meta device.

    Raises:
        ConfigError: transformers cannot build it, the files hold other weights, it lacks the head that `config` asks for, its
            matrices cannot be split over the ranks, or it lacks a layer that the adapter of ``trainer.lora`` needs.
    """
    check_mesh(config, model_dir)
    model = model_without_weights(model_dir, config.head)
    if config.head == "value":
        value_head(model)
    else:
        causal_head(model)
    refuse_other_weights(model, model_dir, config.head)
    if config.fsdp2.tensor_parallel > 1:
        parallel_styles(model)
    if config.lora is not None:
        check_adapter(model, decoder_layers(model), config.lora)
    return model


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks that transformers says must not be split, or else the members of the longest module list."""
    kept_whole = set(getattr(model, "_no_split_modules", None) or ())
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    layers = [layer for blocks in lists for layer in blocks if type(layer).__name__ in kept_whole]
    return layers or max((list(blocks) for blocks in lists), key=len, default=[])
