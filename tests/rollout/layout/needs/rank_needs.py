"""Elements of a checkpoint that a rank reads, compared with those that it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from loaded_models import (
    committed,
    differing,
    forced,
    in_slices,
    loaded,
    ordinary,
    state,
    tensors_of,
)

from weightlane.ckpt_engines import WeightlaneError
from weightlane.rollout.contract.rank_group import RankGroup
from weightlane.rollout.layout import version_loader as loader_module
from weightlane.rollout.layout.loading.checkpoint_expectation import checkpoint_specs
from weightlane.rollout.layout.map.layout_map import SourceSpec
from weightlane.rollout.layout.offline.rank_models import as_rank, engine_config, model_of_rank
from weightlane.rollout.layout.rank_model import RankModel
from weightlane.rollout.layout.trace.loading_reads import read_by_loading
from weightlane.rollout.layout.trace.trace import trace_loading
from weightlane.rollout.layout.version_loader import VersionLoader
from weightlane.sync import SlicedTensors
from weightlane.sync.version.box import Box
from weightlane.sync.version.sliced_tensors import Slicing


def rank_layout(path: str, dtype: str, rank: int, world: int, expert_parallel: bool) -> str:
    """The layout that one rank of several would trace."""
    config = engine_config(path, tensor_parallel=world, dtype=dtype, expert_parallel=expert_parallel)
    with model_of_rank(config, rank) as model:
        specs = {
            name: SourceSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors_of(path, dtype).items()
        }
        return str(trace_loading(model, specs))


def slices_of_reloads(path: str, other_path: str, world: int) -> list[dict[str, Any]]:
    """A version that vLLM's own loading takes, and of which each rank gets only what it asks for.

    Returns for each rank what it asks for, and what it then holds.
    """
    from safetensors.torch import load_file

    config, alone = engine_config(path, tensor_parallel=world, dtype="bfloat16"), RankGroup(None)
    second = load_file(Path(other_path) / "model.safetensors")
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nobody has written holds NaN
    answers = []

    def too_few(*asked: Any) -> dict[str, list[Box]]:
        boxes = read_by_loading(*asked)
        boxes["model.layers.1.mlp.up_proj.weight"].pop()
        return boxes

    for rank in range(world):
        with as_rank(config, rank), forced("reload"):
            wanted = ordinary(other_path, config)
            model = loaded(config)
            before = state(model)
            specs = checkpoint_specs(path, torch.bfloat16)
            blind, loader = (VersionLoader(RankModel(model, config, torch.device("cpu"), "test")) for _ in range(2))
            assert loader.needed() is None, "slices are asked for before it is shown that they are enough"
            with mock.patch.object(loader_module, "read_by_loading", too_few):
                blind.learn(specs, alone)
            loader.learn(specs, alone)
            touched = differing(before, state(model))
            needed = loader.needed()
            assert needed is not None
            sliced = in_slices(second, needed)
            way = committed(loader, sliced, alone)
            answers.append(
                {
                    "way": way,
                    "blind": blind.needed() is None,
                    "touched": touched,
                    "changed": len(differing(before, state(model))),
                    "differing": differing(wanted, state(model)),
                    "boxes": {
                        spec.name: [box.to_plain() for box in boxes]
                        for spec, boxes in zip(needed.specs, needed.boxes, strict=True)
                    },
                }
            )
            come = dict([*sliced.staged.items()][1:])
            fewer = Slicing("plan", needed.specs, sliced.slicing.regions[1:])
            before = state(model)
            try:
                committed(loader, SlicedTensors(fewer, come), alone)
            except WeightlaneError as error:
                answers[-1]["refused"] = str(error)
            answers[-1]["unchanged"] = not differing(before, state(model))
    torch.use_deterministic_algorithms(False)
    return answers
