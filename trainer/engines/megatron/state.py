"""Load and save the slices of a model that a rank of the megatron engine holds, and export saved ones.

A saved state is a directory with ``state.json`` and one safetensors file per rank. Tensors in it are named by checkpoint tensor
and position, not by rank: ``weight|model.norm.weight|0`` is the slice of that checkpoint tensor that begins at index 0. Any
number of ranks in any layout can therefore read it, and nothing in it is code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.box import Box
from weightlane.sync.version.tensor_spec import LocalShard, TensorSpec

from ...config import Head, TrainerConfig
from ..hf.export import ExportedModel, export_alone
from ..hf.model_dir import kept_types
from ..hf.partial_dir import PART, storage_errors, write_together
from ..hf.stored_slices import (
    SliceReader,
    StoredSlice,
    hf_tensors,
    misfit,
    refuse_other_state,
    refuse_weights,
    shapes_in,
)
from ..lora.saved import SavedAdapters, check_adapters
from ..rank_collectives import on_every_rank, share_json
from .checkpoint_names import HEAD, VALUE_HEAD, CheckpointShape, checkpoint_shapes
from .model_facts import read_model
from .weights import WEIGHT, WeightSlice

_STATE = "state.json"
_KIND = ("megatron", 1)
_RANDOM = "random"


def load_model(
    model_dir: Path,
    model: CheckpointShape,
    shapes: Mapping[str, tuple[int, ...]],
    slices: Iterable[WeightSlice],
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


def check_files(config: TrainerConfig, model_dir: Path, model: CheckpointShape, state: Path | None) -> None:
    """Raise the `ConfigError` with which `load_model` would refuse `model_dir`, or `load` of the engine a saved `state`.

    Reads headers; not collective.
    """
    _fitting_tensors(model_dir, model, checkpoint_shapes(model))
    if state is not None:
        refuse_other_state(state, _saved_shapes(_state_tensors(state)[1]), checkpoint_shapes(model))
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
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and name not in shapes and f"{match[0]}input_layernorm.weight" not in shapes


def save_state(
    directory: Path,
    slices: Sequence[WeightSlice],
    step: int,
    layout: Mapping[str, Any],
    rank: int,
    device: torch.device,
    write_beside: Callable[[Path], None],
) -> None:
    """Write the state, with the other files of it that `write_beside` writes into its directory on rank 0. Collective."""
    from safetensors.torch import save_file  # noqa: PLC0415 - optional

    owned = _owned(slices, rank, device)

    def write(partial: Path) -> None:
        tensors = {f"{_RANDOM}|{name}|": state for name, state in _random_state().items()}
        for piece, mine in zip(slices, owned, strict=True):
            if mine:
                for kind, tensor in piece.kinds():
                    key = f"{kind}|{piece.name}|{','.join(map(str, piece.box.starts))}"
                    tensors[key] = tensor.detach().cpu().contiguous()
        with storage_errors("written", directory):
            save_file(tensors, partial / f"rank-{rank:05d}.safetensors")

    def finish(partial: Path) -> None:
        write_beside(partial)
        about = {"engine": _KIND[0], "format": _KIND[1], "step": step, **layout}
        (partial / _STATE).write_text(json.dumps(about, indent=1), encoding="utf-8")

    write_together(directory, lambda partial: on_every_rank(lambda: write(partial), device, PART), finish, rank, device)


def load_state(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    slices: Sequence[WeightSlice],
    rank: int,
    device: torch.device,
) -> int:
    """Fill weights and moments from a state of `save_state`, restore this rank's random state, return the step. Collective.

    Raises `ConfigError`, with nothing filled on any rank, when the state is not one of a model with exactly the tensors `shapes`.
    """
    wanted = [(f"{kind}|{piece.name}", piece.box, into) for piece in slices for kind, into in piece.kinds()]
    found: list[tuple[int, dict[str, list[StoredSlice]]]] = []

    def check() -> None:
        about, stored = _state_tensors(directory)
        refuse_other_state(directory, _saved_shapes(stored), shapes)
        with SliceReader(stored) as reader:
            if lacking := next((name for name, box, _ in wanted if not reader.holds(name, box)), None):
                raise ConfigError(
                    f"the training state in {directory} does not fit this model: it lacks some of {lacking}.",
                    part=PART,
                    hint="Check model and path.",
                )
        found.append((int(about["step"]), stored))

    def read() -> None:
        with SliceReader(stored) as reader:
            for name, box, into in wanted:
                reader.read(name, box, into)
        _restore_random_state(directory, rank, device)

    on_every_rank(check, device, PART)  # before any rank reads
    ((step, stored),) = found
    on_every_rank(read, device, PART)
    return step


def export_saved(state: Path, model_dir: Path, directory: Path, dtype: torch.dtype, head: Head) -> None:
    """Export the weights that `save_state` wrote as a Hugging Face directory, in one process, tensor by tensor."""
    _, stored = _state_tensors(state)
    shapes = _saved_shapes(stored)
    refuse_other_state(state, shapes, checkpoint_shapes(read_model(model_dir, head).shape))
    kept, adapters = kept_types(model_dir, shapes), SavedAdapters.read(state)
    specs = [TensorSpec(name, shape, torch.float32 if name in kept else dtype) for name, shape in shapes.items()]
    shards = [LocalShard.whole(spec, torch.empty(spec.shape, device="meta")) for spec in specs]
    with SliceReader(stored) as reader:

        def values_of(shard: LocalShard) -> torch.Tensor:
            full = torch.empty(shard.spec.shape)
            reader.read(f"{WEIGHT}|{shard.spec.name}", shard.box, full)
            return adapters.merged(shard.spec.name, full)

        export_alone(directory, ExportedModel(model_dir, head, dtype), shards, values_of)


def _saved_shapes(stored: Mapping[str, Sequence[StoredSlice]]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each checkpoint tensor in a state, from `stored`, all its slices by ``kind|name``."""
    kinds = {key: key.split("|") for key in stored}
    return {
        name: tuple(map(max, zip(*(piece.box.stops for piece in stored[key]), strict=True)))
        for key, (kind, name) in kinds.items()
        if kind == WEIGHT
    }


def _owned(slices: Sequence[WeightSlice], rank: int, device: torch.device) -> list[bool]:
    """Return for each slice whether this is the first rank that holds it: replicas are written once."""
    held = share_json([[piece.name, piece.box.to_plain()] for piece in slices], device)
    before = {f"{name} {plain}" for described in held[:rank] for name, plain in described}
    return [f"{name} {plain}" not in before for name, plain in held[rank]]


def _state_tensors(directory: Path) -> tuple[dict[str, Any], dict[str, list[StoredSlice]]]:
    """Return the contents of ``state.json``, and the slices in all files by ``kind|name``."""
    try:
        about = json.loads((directory / _STATE).read_text(encoding="utf-8"))
        found, ranks = (about["engine"], about["format"]), int(about["ranks"])
    except FileNotFoundError:
        raise ConfigError(f"{directory} holds no saved training state.", part=PART, hint="Check the path.") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
        raise ConfigError(
            f"the training state in {directory} is not one of this megatron engine: {cause}.", part=PART
        ) from cause
    if found != _KIND:
        raise ConfigError(
            f"the training state in {directory} is of engine {found[0]}, format {found[1]}.",
            part=PART,
            hint=f"This engine reads {_KIND[0]}, format {_KIND[1]}.",
        )
    stored: dict[str, list[StoredSlice]] = {}
    for file in [directory / f"rank-{rank:05d}.safetensors" for rank in range(ranks)]:
        for key, shape in shapes_in(file):
            kind, name, starts = key.split("|")
            if kind != _RANDOM:
                box = Box(tuple(int(start) for start in starts.split(",")), shape)
                stored.setdefault(f"{kind}|{name}", []).append(StoredSlice(box, file, key))
    return about, stored


def _random_state() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_state(directory: Path, rank: int, device: torch.device) -> None:
    """Restore this rank's random state. A state saved with fewer ranks has none for this one, which keeps the seed's."""
    from safetensors import safe_open  # noqa: PLC0415 - optional

    file = directory / f"rank-{rank:05d}.safetensors"
    if not file.is_file():
        return
    with safe_open(file, framework="pt") as opened:
        torch.set_rng_state(opened.get_tensor(f"{_RANDOM}|cpu|"))
        if device.type == "cuda" and f"{_RANDOM}|cuda|" in opened.keys():  # noqa: SIM118 - not a dict
            torch.cuda.set_rng_state(opened.get_tensor(f"{_RANDOM}|cuda|"))
