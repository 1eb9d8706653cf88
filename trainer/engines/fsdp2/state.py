"""Save and load the state of an `Fsdp2Engine`, and export a saved one.

Functions are collective unless their docstring says otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from weightlane.ckpt_engines import ConfigError, StorageError
from weightlane.sync.torchrun.module_slices import held_slice
from weightlane.sync.version.tensor_spec import LocalShard

from ..hf.export import ExportedModel, export_alone
from ..hf.model_dir import is_model_dir
from ..hf.names import CheckpointRun
from ..hf.partial_dir import PART, storage_error, write_together
from ..hf.stored_slices import copy_exactly, refuse_other_state
from ..lora.saved import SavedAdapters
from ..rank_collectives import on_every_rank
from .loading import weights_reader
from .shards import local_shards

_MODEL = "model."
"""Prefix of the names of weights in a saved state."""


def save_state(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Mapping[str, torch.Tensor]],
    step: int,
    rank: int,
    device: torch.device,
    write_beside: Callable[[Path], None],
) -> None:
    """Write the state, with the other files of it that `write_beside` writes into its directory on rank 0."""
    state = _state(tensors, optimizer, rank)
    state["step"] = torch.tensor(step)

    def write(partial: Path) -> None:
        try:
            save(state, checkpoint_id=partial)
        except (CheckpointException, OSError) as cause:
            raise _storage_error("written", directory, cause) from cause

    write_together(directory, write, write_beside, rank, device)


def resume(
    directory: Path,
    head: str,
    runs: Sequence[CheckpointRun],
    tensors: Mapping[str, torch.Tensor],
    moments: Mapping[str, Mapping[str, torch.Tensor]],
    rank: int,
    device: torch.device,
    *,
    optimizer: bool,
) -> int:
    """Implement `TrainingEngine.load` for the model whose checkpoint tensors are `runs`. Returns the step."""
    if is_model_dir(directory, head, device):
        readers: list[Callable[[], None]] = []  # no rank reads before every rank's checks have passed
        on_every_rank(lambda: readers.append(weights_reader(directory, head, runs, tensors)), device, PART)
        on_every_rank(readers[0], device, PART)
        optimizer = False
    else:
        step = load_state(directory, tensors, moments, rank, device)
    if optimizer:
        return step
    for state in moments.values():
        for tensor in state.values():
            tensor.zero_()
    return 0


def check_saved(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:
    """Check that `directory` has a training state of the model whose tensors have these `shapes`, by in-memory name.

    Reads no weights; not collective. Returns torch's description of everything in the state, by key.

    Raises `ConfigError` for no state or one of another model, `StorageError` for one that cannot be read.
    """
    if not (directory / ".metadata").is_file():
        raise ConfigError(f"{directory} holds no saved training state.", part=PART, hint="Check the path.")
    try:
        known: Mapping[str, Any] = FileSystemReader(directory).read_metadata().state_dict_metadata
    except (CheckpointException, Exception) as cause:  # unpickling damaged bytes raises anything
        raise _storage_error("read", directory, cause) from cause
    saved = {
        key.removeprefix(_MODEL): tuple(about.size)
        for key, about in known.items()
        if key.startswith(_MODEL) and isinstance(about, TensorStorageMetadata)
    }
    refuse_other_state(directory, saved, shapes)
    return known


def load_state(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Mapping[str, torch.Tensor]],
    rank: int,
    device: torch.device,
) -> int:
    """Fill `tensors` and `optimizer` in place from `directory` and return the step; restore this rank's random state."""
    state = _state(tensors, optimizer, rank)
    known: dict[str, Any] = {}

    def check() -> None:
        known.update(check_saved(directory, {name: tuple(tensor.shape) for name, tensor in tensors.items()}))
        if lacking := next((key for key in state["optimizer"] if f"optimizer.{key}" not in known), None):
            raise ConfigError(
                f"the training state in {directory} does not fit this model: it lacks the optimizer's {lacking}.",
                part=PART,
                hint="Check model and path, and that trainer.frozen is as it was.",
            )

    on_every_rank(check, device, PART)  # before any rank reads
    state["step"] = torch.tensor(0)
    try:
        # A state saved with fewer ranks has no random state for this one, which then keeps the seed's.
        state["random"] = {key: value for key, value in state["random"].items() if f"random.{key}" in known}
        wider = {
            name: torch.empty_like(tensor, dtype=known[f"{_MODEL}{name}"].properties.dtype)
            for name, tensor in state["model"].items()
            if known[f"{_MODEL}{name}"].properties.dtype != tensor.dtype
        }
        load({**state, "model": {**state["model"], **wider}}, checkpoint_id=directory)
    except (CheckpointException, OSError) as cause:
        raise _storage_error("read", directory, cause) from cause

    def take() -> None:
        for name, tensor in wider.items():
            _, wide = held_slice(name, tensor, PART)
            _, own = held_slice(name, tensors[name], PART)
            copy_exactly(wide, own, name)

    on_every_rank(take, device, PART)  # or only the ranks would fail whose own slices are of another model
    if f"cpu_{rank}" in state["random"]:
        torch.set_rng_state(state["random"][f"cpu_{rank}"])
    if device.type == "cuda" and f"cuda_{rank}" in state["random"]:
        torch.cuda.set_rng_state(state["random"][f"cuda_{rank}"])
    return int(state["step"])


def export_saved(
    state: Path,
    about: ExportedModel,
    runs: Sequence[CheckpointRun],
    shapes: Mapping[str, tuple[int, ...]],
    kept: Collection[str],
    directory: Path,
) -> None:
    """Export the weights that `save_state` wrote as a Hugging Face directory, in one process. Raises as `check_saved`.

    `runs` are the checkpoint tensors of the model, of which `kept` keep their own dtype; `shapes` those of the tensors in the
    state. In memory at a time: one tensor of the state, and what is written of it.
    """
    saved, adapters = check_saved(state, shapes), SavedAdapters.read(state)
    dtypes = {name: saved[f"{_MODEL}{name}"].properties.dtype for name in shapes}
    own = {run.name: run for run in runs}
    reader = FileSystemReader(state)
    # Each load reads the description of everything in the state, which takes seconds if many ranks saved it.
    reader.read_metadata = lru_cache(reader.read_metadata)  # type: ignore[method-assign]

    @lru_cache(maxsize=1)
    def stored(name: str) -> torch.Tensor:
        tensor = torch.empty(shapes[name], dtype=dtypes[name])
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
                load({_MODEL.rstrip("."): {name: tensor}}, storage_reader=reader, no_dist=True)
        except (CheckpointException, OSError) as cause:
            raise _storage_error("read", state, cause) from cause
        return adapters.merged(name, tensor)

    def values_of(shard: LocalShard) -> torch.Tensor:
        run = own[shard.spec.name]
        return stored(run.source).flatten()[run.offset : run.offset + shard.spec.numel].view(run.shape)

    outlines = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}
    export_alone(directory, about, local_shards(runs, outlines, 0, about.dtype, kept), values_of)


def _state(
    tensors: Mapping[str, torch.Tensor], optimizer: Mapping[str, Mapping[str, torch.Tensor]], rank: int
) -> dict[str, Any]:
    random_state = {f"cpu_{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        random_state[f"cuda_{rank}"] = torch.cuda.get_rng_state()
    return {
        "model": {name: tensor.detach() for name, tensor in tensors.items()},
        "optimizer": {f"{name}/{key}": value for name, state in optimizer.items() for key, value in state.items()},
        "random": random_state,
    }


def _storage_error(verb: str, directory: Path, cause: BaseException) -> StorageError:
    detail: BaseException = cause
    if isinstance(cause, CheckpointException) and cause.failures:
        detail = next(iter(cause.failures.values()))[0]
    return storage_error(verb, directory, detail)
