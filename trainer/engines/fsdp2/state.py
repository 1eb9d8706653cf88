"""The parameters and moments of a model as the slices that this rank saves and loads. Works on plain tensors, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ..hf.model_dir import is_model_dir
from ..hf.names import CheckpointRun
from ..hf.partial_dir import PART
from ..hf.training_state import TrainedSlice, load_state, save_state
from ..optimizers.settings import STEP, set_steps
from ..rank_collectives import on_every_rank
from .loading import weights_reader
from .shards import local_shards

OptimizerState = Mapping[str, Mapping[str, torch.Tensor]]
"""This rank's part of the optimizer's state of each parameter, by in-memory name: moments by the optimizer's names for them, and
the number of its steps, if it counts them, as ``step``."""


def save(
    directory: Path,
    runs: Sequence[CheckpointRun],
    tensors: Mapping[str, torch.Tensor],
    optimizer: OptimizerState,
    step: int,
    rank: int,
    device: torch.device,
    write_beside: Callable[[Path], None],
) -> None:
    """Implement `TrainingEngine.save` for a model whose checkpoint tensors are `runs` of `tensors`. See `save_state`."""
    steps = _steps(optimizer)
    behind = {run.name: steps[run.source] for run in runs if steps.get(run.source, step) != step}
    save_state(directory, _slices(runs, tensors, optimizer), step, rank, device, write_beside, behind)


def resume(
    directory: Path,
    head: str,
    runs: Sequence[CheckpointRun],
    tensors: Mapping[str, torch.Tensor],
    optimizer_state: OptimizerState,
    rank: int,
    device: torch.device,
    *,
    optimizer: bool,
) -> int:
    """Implement `TrainingEngine.load` for a model whose checkpoint tensors are `runs` of `tensors`. Returns the step."""
    if is_model_dir(directory, head, device):
        readers: list[Callable[[], None]] = []  # no rank reads before every rank's checks have passed
        on_every_rank(lambda: readers.append(weights_reader(directory, head, runs, tensors)), device, PART)
        on_every_rank(readers[0], device, PART)
        optimizer = False
    else:
        shapes = {run.name: run.shape for run in runs}
        slices = _slices(runs, tensors, optimizer_state)
        step, steps = load_state(directory, shapes, slices, rank, device, optimizer=optimizer)
    if not optimizer:
        step, steps = 0, {}
    counts = {run.source: steps.get(run.name, step) for run in runs}
    for source, state in optimizer_state.items():
        set_steps(state, counts[source], forget=not optimizer)
    return step


def _steps(optimizer: OptimizerState) -> dict[str, int]:
    """Return the steps in which each parameter had a gradient, by in-memory name, for optimizers that count them."""
    counted = [source for source, state in optimizer.items() if STEP in state]
    counts = torch.stack([optimizer[source][STEP] for source in counted]).tolist() if counted else []
    return dict(zip(counted, map(int, counts), strict=True))


def _slices(
    runs: Sequence[CheckpointRun], tensors: Mapping[str, torch.Tensor], optimizer: OptimizerState
) -> list[TrainedSlice]:
    """List the slices that are on this rank; replicas are on several."""
    moments: dict[str, dict[str, torch.Tensor]] = {run.name: {} for run in runs}
    for key in {key for state in optimizer.values() for key in state} - {STEP}:
        values = {source: state[key] for source, state in optimizer.items() if key in state}
        trained = [run for run in runs if run.source in values]
        for shard in local_shards(trained, tensors, rank=0, dtype=None, kept=(), values=values):
            moments[shard.spec.name][key] = shard.data
    return [
        TrainedSlice(shard.spec.name, shard.box, shard.data, moments[shard.spec.name])
        for shard in local_shards(runs, tensors, rank=0, dtype=None, kept=())
        if shard.numel
    ]
