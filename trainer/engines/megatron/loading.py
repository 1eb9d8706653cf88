"""Load the slices of a Hugging Face model that a rank of the megatron engine holds, and check files before it does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from ...config import Head, TrainerConfig
from ..hf.export import ExportedModel
from ..hf.model_dir import is_model_dir
from ..hf.names import CheckpointRun
from ..hf.partial_dir import PART
from ..hf.stored_slices import SliceReader, StoredSlice, hf_tensors, misfit, refuse_weights
from ..hf.training_state import TrainedSlice, check_state, export_saved, load_state
from ..lora.saved import SavedAdapters, check_adapters
from ..optimizers.settings import MOMENTS, Moments, set_steps
from ..rank_collectives import on_every_rank
from .checkpoint import EXPERT_BIAS, HEAD, VALUE_HEAD, CheckpointShape, checkpoint_shapes


def load_model(
    model_dir: Path,
    model: CheckpointShape,
    shapes: Mapping[str, tuple[int, ...]],
    slices: Iterable[TrainedSlice],
    device: torch.device,
) -> None:
    """Fill the weights of `slices` from a Hugging Face directory; reads no other element. Collective.

    Raises `ConfigError`, with nothing filled on any rank, when the files of one do not hold exactly the tensors of `shapes`. They
    may hold a head that `model` does not have, and may lack a value head, which is then zeros.
    """
    stored: dict[str, StoredSlice] = {}
    on_every_rank(lambda: stored.update(_fitting_tensors(model_dir, model, shapes)), device, PART)

    def read() -> None:
        with SliceReader({name: [entry] for name, entry in stored.items()}) as reader:
            for piece in slices:
                if piece.name in stored:
                    reader.read(piece.name, piece.box, piece.weight)
                else:
                    piece.weight.zero_()

    on_every_rank(read, device, PART)


def resume(
    directory: Path,
    head: Head,
    model: CheckpointShape,
    slices: Sequence[TrainedSlice],
    moments: Moments,
    rank: int,
    device: torch.device,
    *,
    optimizer: bool,
) -> int:
    """Implement `TrainingEngine.load` for a model whose weights and moments on this rank are `slices`. Returns the step.

    The state may be of any number and layout of ranks, and of another engine.
    """
    shapes = checkpoint_shapes(model)
    if is_model_dir(directory, head, device):
        load_model(directory, model, shapes, slices, device)
        optimizer = False
    else:
        # megatron-core's optimizers have a gradient for every weight in every step.
        step, _ = load_state(directory, shapes, slices, rank, device, optimizer=optimizer)
    if not optimizer:
        step = 0
    for state in moments.values():
        set_steps(state, step, forget=not optimizer)
    return step


def export_state(state: Path, model: CheckpointShape, about: ExportedModel, directory: Path) -> None:
    """Implement `TrainingEngine.export_saved`; reads the weights only."""
    shapes = checkpoint_shapes(model)
    runs = [CheckpointRun(name, shape, name, 0) for name, shape in shapes.items()]
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    adapters = SavedAdapters.read(state)
    adapters.refuse_layers_beyond([name.removesuffix(".weight") for name in shapes], state)
    export_saved(state, about, runs, tensors, adapters.merged, directory)


def check_files(config: TrainerConfig, model_dir: Path, model: CheckpointShape, state: Path | None) -> None:
    """Raise the `ConfigError` with which `load_model` would refuse `model_dir`, or `load` of the engine a saved `state`.

    Reads headers; not collective.
    """
    _fitting_tensors(model_dir, model, checkpoint_shapes(model))
    if state is not None:
        shapes = checkpoint_shapes(model)
        trained = [name for name in shapes if config.trains_weights and not name.endswith(EXPERT_BIAS)]
        check_state(state, shapes, dict.fromkeys(trained, MOMENTS))
        check_adapters(state, config)


def _fitting_tensors(
    model_dir: Path, model: CheckpointShape, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, StoredSlice]:
    """Return the tensors in `model_dir`, after checking that they are those of `shapes`, except for heads. See `load_model`."""
    stored = hf_tensors(model_dir)
    held = {name: entry.box.shape for name, entry in stored.items()}
    if model.tied or model.valued:
        held.pop(HEAD, None)
    shapes = {
        name: shape
        for name, shape in shapes.items()
        if name in held or not (model.valued and name.startswith(VALUE_HEAD))
    }
    held = {name: shape for name, shape in held.items() if not _is_extra_layer(name, shapes)}
    refuse_weights(model_dir, misfit(held, shapes))
    return stored


def _is_extra_layer(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether tensor `name` is of a layer after the last one, which predicts further tokens and is not trained."""
    if name.startswith("mtp."):
        return True
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and name not in shapes and f"{match[0]}input_layernorm.weight" not in shapes
