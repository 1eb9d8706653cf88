"""Prepare a Hugging Face model for FSDP2: check that it can be trained, and allocate what this rank holds of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from ...config import TrainerConfig
from ..hf.checkpoint import CheckpointRun, checkpoint_runs, checkpoint_tensors, model_without_weights, stored_weights
from ..hf.context_split import check_context
from ..hf.heads import causal_head, value_head
from ..hf.model_dir import half_precision, stored_types
from .lora import check_adapter
from .mesh import check_mesh, parallel_styles
from .router_replay import expert_blocks


def checked_model(config: TrainerConfig, model_dir: Path) -> tuple[torch.nn.Module, list[CheckpointRun]]:
    """Return the model in `model_dir` with its parameters on the meta device, and its checkpoint tensors.

    Raises:
        ConfigError: transformers cannot build it, the files hold other weights, it lacks the head that `config` asks for, its
            matrices or tokens cannot be split over the ranks, or it lacks a layer that the adapter of ``trainer.lora`` needs.
    """
    check_mesh(config, model_dir)
    model = model_without_weights(model_dir, config.head)
    if config.head == "value":
        value_head(model)
    else:
        causal_head(model)
    runs = checkpoint_runs(model, checkpoint_tensors(model))
    stored_weights(model, model_dir, config.head, {run.name: run.shape for run in runs})
    if config.fsdp2.tensor_parallel > 1:
        parallel_styles(model)
    check_context(config, model)
    if config.router_replay:
        expert_blocks(model, decoder_layers(model))
    if config.lora is not None:
        check_adapter(model, decoder_layers(model), runs, config.lora)
    return model, runs


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks that transformers says must not be split, or else the members of the longest module list."""
    kept_whole = set(getattr(model, "_no_split_modules", None) or ())
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    layers = [layer for blocks in lists for layer in blocks if type(layer).__name__ in kept_whole]
    return layers or max((list(blocks) for blocks in lists), key=len, default=[])


def hold_as_stored(model: torch.nn.Module, runs: Sequence[CheckpointRun], model_dir: Path) -> None:
    """Give the parameters of a model that is not trained the half-precision dtype in which `model_dir` has their tensors `runs`.

    Layers compute as with float32 copies: FSDP converts a parameter, exactly or with one rounding, when it is gathered. Call it
    before the model is sharded.
    """
    stored, found = stored_types(model_dir), defaultdict[str, list[torch.dtype | None]](list)
    for run in runs:
        found[run.source].append(stored.get(run.name))
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(half_precision(found[name]))


def materialise(model: torch.nn.Module, device: torch.device) -> None:
    """Allocate the parameters that are on the meta device on `device`, uninitialised, and move the others there.

    Tied parameters stay tied.
    """
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[parameter] = torch.nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = made[parameter]
    model.to(device)  # also tells FSDP of the new parameters
