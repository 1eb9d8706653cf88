"""Save, load and export the state of a training engine: weights, the optimizer's moments, and each rank's random state.

A saved state is a directory with ``state.json`` and one safetensors file per rank. Tensors in it are named by checkpoint tensor
and position, not by rank: ``weight|model.norm.weight|0`` is the slice of that checkpoint tensor that begins at index 0. It can
therefore be read by any engine on any number of ranks in any layout, and nothing in it is code.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.box import Box
from weightlane.sync.version.tensor_spec import LocalShard, TensorSpec

from ..optimizers.settings import STEP
from ..rank_collectives import on_every_rank, share_json
from .checkpoint import CheckpointRun, weights_reader
from .export import ExportedModel, export_alone
from .model_dir import is_model_dir, kept_types
from .partial_dir import PART, storage_errors, to_disk, write_together
from .stored_slices import SliceReader, StoredSlice, TrainedSlice, some_of, sources_of

_STATE = "state.json"
_FORMAT = 2
_WEIGHT, _RANDOM = "weight", "random"
_MOST = 2**31
"""More steps or ranks than any state has."""


def save_state(
    directory: Path,
    slices: Sequence[TrainedSlice],
    step: int,
    rank: int,
    device: torch.device,
    write_beside: Callable[[Path], None] = lambda _: None,
) -> None:
    """Implement `TrainingEngine.save`: write weights, moments and steps of the `slices` on this rank. Collective.

    `write_beside` writes other files of the state into its directory, on rank 0. A rank needs memory for a copy of its part on
    the CPU, if it is elsewhere.
    """
    from safetensors.torch import save_file  # noqa: PLC0415 - optional

    held = [f"{piece.name} {piece.box.to_plain()}" for piece in slices]
    told = share_json([uuid.uuid4().hex, held, _behind(slices, step)], device)
    token = told[0][0]
    elsewhere = {name for _, described, _ in told[:rank] for name in described}  # replicas are written once
    steps = {name: count for *_, behind in told for name, count in behind.items()}

    def write(partial: Path) -> None:
        tensors = {f"{_RANDOM}|cpu|": torch.get_rng_state()}
        if torch.cuda.is_available():
            tensors[f"{_RANDOM}|cuda|"] = torch.cuda.get_rng_state()
        for piece, described in zip(slices, held, strict=True):
            for kind, tensor in _kinds(piece) if described not in elsewhere else ():
                key = f"{kind}|{piece.name}|{','.join(map(str, piece.box.starts))}"
                tensors[key] = tensor.detach().cpu().contiguous()
        file = partial / _file_name(rank)
        with storage_errors("written", directory):
            save_file(tensors, file, {_STATE: token})
            to_disk(file)

    def finish(partial: Path) -> None:
        write_beside(partial)
        about = {"format": _FORMAT, "state": token, "ranks": len(told), "step": step, "steps": steps}
        (partial / _STATE).write_text(json.dumps(about, indent=1), encoding="utf-8")

    write_together(directory, lambda partial: on_every_rank(lambda: write(partial), device, PART), finish, rank, device)


def load_model(
    model_dir: Path,
    head: str,
    shapes: Mapping[str, tuple[int, ...]],
    slices: Sequence[TrainedSlice],
    device: torch.device,
) -> None:
    """Fill weights from a Hugging Face directory. Collective. Raises as `weights_reader`, with nothing filled on any rank."""
    readers: list[Callable[[Sequence[TrainedSlice]], None]] = []
    on_every_rank(lambda: readers.append(weights_reader(model_dir, head, shapes)), device, PART)
    on_every_rank(lambda: readers[0](slices), device, PART)


def resume(
    directory: Path,
    head: str,
    shapes: Mapping[str, tuple[int, ...]],
    slices: Sequence[TrainedSlice],
    rank: int,
    device: torch.device,
    *,
    optimizer: bool,
) -> int:
    """Implement `TrainingEngine.load` for the checkpoint tensors `shapes`, of which this rank trains `slices`. Collective.

    The state may be of any number and layout of ranks, and of another engine. Returns the step.
    """
    if is_model_dir(directory, head, device):
        load_model(directory, head, shapes, slices, device)
        optimizer = False
    else:
        step, steps = _load_state(directory, shapes, slices, rank, device, optimizer=optimizer)
    if not optimizer:
        step, steps = 0, {}
    for piece in slices:
        for kind, tensor in piece.moments.items():
            if kind == STEP:
                tensor.fill_(steps.get(piece.name, step))
            elif not optimizer:
                tensor.zero_()
    return step


def _load_state(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    slices: Sequence[TrainedSlice],
    rank: int,
    device: torch.device,
    *,
    optimizer: bool,
) -> tuple[int, Mapping[str, int]]:
    """Fill weights and, with `optimizer`, moments from a state of `save_state`, and restore this rank's random state. Collective.

    Returns the step, and the steps of tensors that were changed in fewer.

    Raises `ConfigError`, with nothing filled on any rank, when the state is not one of a model with exactly the tensors `shapes`.
    """
    wanted = [
        (f"{kind}|{piece.name}", piece.box, into)
        for piece in slices
        for kind, into in (_kinds(piece) if optimizer else [(_WEIGHT, piece.weight)])
    ]
    found: list[_SavedState] = []

    def check() -> None:
        saved = _SavedState.read(directory)
        saved.refuse_other(directory, shapes, {name for name, _, _ in wanted})
        found.append(saved)

    def read() -> None:
        with SliceReader(saved.stored) as reader:
            for name, box, into in wanted:
                reader.read(name, box, into, rounds=not name.startswith(f"{_WEIGHT}|"))  # moments may be held in less
        _restore_random_state(directory / _file_name(rank), device)

    on_every_rank(check, device, PART)  # before any rank reads
    (saved,) = found
    on_every_rank(read, device, PART)
    return saved.step, saved.steps


def check_state(directory: Path, shapes: Mapping[str, tuple[int, ...]], moments: Mapping[str, Collection[str]]) -> None:
    """Raise the `ConfigError` with which `resume` would refuse the state in `directory`. Reads headers; not collective.

    `moments` are those of each trained checkpoint tensor.
    """
    wanted = {f"{kind}|{name}" for name, kinds in moments.items() for kind in kinds if 0 not in shapes[name]}
    _SavedState.read(directory).refuse_other(directory, shapes, wanted)


def export_saved(
    state: Path,
    about: ExportedModel,
    runs: Sequence[CheckpointRun],
    tensors: Mapping[str, torch.Tensor],
    merged: Callable[[str, torch.Tensor], torch.Tensor],
    directory: Path,
) -> None:
    """Export the weights that `save_state` wrote as a Hugging Face directory, in one process. Raises as `check_state`.

    `runs` are the checkpoint tensors of the model, and `tensors`, which may be on the meta device, what they are runs of, by
    in-memory name. `merged` gets each in-memory name with its values, and then each other name on disk with its own, and returns
    those that are written. In memory at a time: one of `tensors`, and what is written of it.
    """
    saved = _SavedState.read(state)
    saved.refuse_other(state, {run.name: run.shape for run in runs}, ())
    kept, own = kept_types(about.model_dir, (run.name for run in runs)), {run.name: run for run in runs}
    parts: dict[str, list[CheckpointRun]] = {}
    for run in runs:
        parts.setdefault(run.source, []).append(run)

    def shard_of(run: CheckpointRun) -> LocalShard:
        dtype = tensors[run.source].dtype
        spec = TensorSpec(
            run.name, run.shape, about.dtype if dtype.is_floating_point and run.name not in kept else dtype
        )
        return LocalShard.whole(spec, torch.empty(run.shape, dtype=dtype, device="meta"))

    with SliceReader(saved.stored) as reader:

        @lru_cache(maxsize=1)
        def stored(source: str) -> torch.Tensor:
            tensor = torch.empty(tensors[source].shape, dtype=tensors[source].dtype)
            for run in parts[source]:
                reader.read(f"{_WEIGHT}|{run.name}", Box.whole(run.shape), run.within(tensor))
            return merged(source, tensor)

        def values_of(shard: LocalShard) -> torch.Tensor:
            run = own[shard.spec.name]
            values = run.within(stored(run.source))
            return values if run.name == run.source else merged(run.name, values)

        export_alone(directory, about, [shard_of(run) for run in runs], values_of)


@dataclass(frozen=True, slots=True)
class _SavedState:
    """A saved state as far as it is known without reading weights."""

    step: int
    steps: Mapping[str, int]
    stored: Mapping[str, Sequence[StoredSlice]]
    """All slices by ``kind|name``."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of each of these tensors, of which all elements are there."""

    @classmethod
    def read(cls, directory: Path) -> _SavedState:
        """Read ``state.json``, and the headers of all files. Raises `ConfigError` for what is no whole state of `save_state`."""
        try:
            return cls._read(directory)
        except FileNotFoundError:
            raise ConfigError(
                f"{directory} holds no saved training state.", part=PART, hint="Check the path."
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as cause:
            raise ConfigError(
                f"the training state in {directory} is damaged, or not one that weightlane wrote: {cause}.",
                part=PART,
                hint="Go back to an earlier state.",
            ) from cause

    @classmethod
    def _read(cls, directory: Path) -> _SavedState:
        about = json.loads((directory / _STATE).read_text(encoding="utf-8"))
        if about["format"] != _FORMAT:
            raise ValueError(f"its format is {about['format']}, not {_FORMAT}")
        ranks, step = int(about["ranks"]), int(about["step"])
        steps = {str(name): int(count) for name, count in about["steps"].items()}
        if not (0 < ranks < _MOST and all(0 <= count < _MOST for count in (step, *steps.values()))):
            raise ValueError(f"it is of {ranks} ranks after {step} steps")
        stored: dict[str, list[StoredSlice]] = {}
        for file in map(directory.joinpath, map(_file_name, range(ranks))):
            for key, box in _slices_in(file, about["state"]):
                stored.setdefault(key, []).append(StoredSlice(box, file, f"{key}|{','.join(map(str, box.starts))}"))
        return cls(step, steps, stored, {key: _shape(key, slices) for key, slices in stored.items()})

    def refuse_other(self, directory: Path, shapes: Mapping[str, tuple[int, ...]], kinds: Collection[str]) -> None:
        """Raise `ConfigError` unless the state has exactly the weights `shapes`, and, as ``kind|name``, what `kinds` lists."""
        weights = {
            key.removeprefix(f"{_WEIGHT}|"): shape
            for key, shape in self.shapes.items()
            if key.startswith(f"{_WEIGHT}|")
        }
        wanted = {name: shape for name, shape in shapes.items() if 0 not in shape}
        # A state with more or larger tensors is refused, too: it is of another model, yet parts of it would load.
        for kind, names in (
            ("missing keys", wanted.keys() - weights.keys()),
            ("unexpected keys", weights.keys() - wanted.keys()),
            (
                "mismatched shapes of",
                {name for name in wanted.keys() & weights.keys() if wanted[name] != weights[name]},
            ),
        ):
            if names:
                raise ConfigError(
                    f"the training state in {directory} does not fit this model: {kind} {some_of(names)}.",
                    part=PART,
                    hint="Check model and path: a state is loaded into the model that it was saved from.",
                )
        for key in sorted(kinds):
            if self.shapes.get(key) != shapes[key.partition("|")[2]]:
                raise ConfigError(
                    f"the training state in {directory} does not fit this model: it lacks {key.replace('|', ' of ', 1)}.",
                    part=PART,
                    hint="Check model and path, and that trainer.optimizer, trainer.frozen and trainer.lora are as they were.",
                )


def _slices_in(file: Path, token: str) -> Iterator[tuple[str, Box]]:
    """Yield ``kind|name`` and the place of each slice in a file of the state `token`. Raises `ValueError` for another file."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - optional

    try:
        with safe_open(file, framework="pt") as opened:
            if (opened.metadata() or {}).get(_STATE) != token:
                raise ValueError(f"{file.name} is of another state")
            for key in opened.keys():  # noqa: SIM118 - not a dict
                kind, _, rest = key.partition("|")
                name, _, starts = rest.rpartition("|")
                if kind != _RANDOM:
                    box = Box(
                        tuple(map(int, starts.split(","))) if starts else (), tuple(opened.get_slice(key).get_shape())
                    )
                    yield f"{kind}|{name}", box
    except (OSError, SafetensorError) as cause:
        raise ValueError(f"{file.name} is missing or cut off: {cause}") from cause


def _shape(key: str, slices: Sequence[StoredSlice]) -> tuple[int, ...]:
    """Return the shape of the tensor with these slices. Raises `ValueError` if they are no tensor, or not all of one."""
    shape = tuple(map(max, zip(*(piece.box.stops for piece in slices), strict=True)))
    if any(start < 0 for piece in slices for start in piece.box.starts):
        raise ValueError(f"{key} begins before its first element")
    if sources_of(Box.whole(shape), ((piece, piece.box) for piece in slices))[1]:
        raise ValueError(f"some of {key.replace('|', ' of ', 1)} is missing")
    return shape


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _kinds(piece: TrainedSlice) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``weight`` and the name of each moment, with its view."""
    yield _WEIGHT, piece.weight
    yield from ((kind, tensor) for kind, tensor in piece.moments.items() if kind != STEP)


def _behind(slices: Sequence[TrainedSlice], step: int) -> dict[str, int]:
    """Return the optimizer steps of tensors that were changed in fewer than `step`, since they had no gradient in others."""
    counts = {piece.name: piece.moments[STEP] for piece in slices if STEP in piece.moments}
    steps = torch.stack(list(counts.values())).tolist() if counts else []
    return {name: int(count) for name, count in zip(counts, steps, strict=True) if count != step}


def _restore_random_state(file: Path, device: torch.device) -> None:
    """Restore this rank's random state. A state saved with fewer ranks has none for this one, which keeps the seed's."""
    from safetensors import safe_open  # noqa: PLC0415 - optional

    if not file.is_file():
        return
    with storage_errors("read", file), safe_open(file, framework="pt") as opened:
        torch.set_rng_state(opened.get_tensor(f"{_RANDOM}|cpu|"))
        if device.type == "cuda" and f"{_RANDOM}|cuda|" in opened.keys():  # noqa: SIM118 - not a dict
            torch.cuda.set_rng_state(opened.get_tensor(f"{_RANDOM}|cuda|"))
