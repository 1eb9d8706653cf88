"""The layout of prime-rl's weight broadcasts: ``broadcasts/step_<n>`` with safetensors files, an index, and ``STABLE``.

Read in PrimeIntellect-ai/prime-rl at commit 559b447: its trainer writes the layout in ``transports/weights/filesystem.py``. Its
orchestrator and its evaluation look for the newest folder with ``STABLE``, and have every inference server load that folder.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from weightlane.ckpt_engines import ConfigError, StorageError

_PART = "prime-rl's broadcasts"
_STABLE = "STABLE"
INDEX = "model.safetensors.index.json"
_MOST_FILE_BYTES = 5 << 30
"""Size of a file, as prime-rl's own have it. Writing one takes its size once more in memory."""


def write_step(
    output_dir: str | Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    keep: int = 2,
    most_file_bytes: int = _MOST_FILE_BYTES,
) -> Path:
    """Write the broadcast of `step`, which appears in one moment and complete. One process at a time may write to `output_dir`.

    A process that is killed leaves a hidden folder, which the next call removes.

    Args:
        output_dir: The run's directory, prime-rl's ``output_dir``.
        step: Number of the broadcast, prime-rl's version of the policy.
        tensors: All tensors of the model by their names in its checkpoint, on any device, of any dtype that safetensors has.
            Each name gets bytes of its own, also if two names are of one tensor.
        keep: How many of the newest broadcasts stay, at least one.
        most_file_bytes: Size in bytes at which the next file begins.

    Returns:
        The broadcast's folder.

    Raises:
        StorageError: There is a broadcast of this step, or of a later one, after which prime-rl would never load this one; or
            the files cannot be written. Nothing has changed then.
        ConfigError: `keep` is less than one.
    """
    check_keep(keep)
    folder = Path(output_dir) / "broadcasts"
    if (steps := _stable_steps(folder)) and steps[-1] >= step:
        raise StorageError(
            f"{_place(folder, steps[-1])} is there already, and prime-rl never goes back to step {step}.",
            part=_PART,
            hint="Remove the broadcasts of an earlier run, or publish later steps.",
        )
    hidden = folder / f".step_{step}"  # prime-rl looks at step_* only
    try:
        for leftover in folder.glob(".step_*"):
            shutil.rmtree(leftover)
        hidden.mkdir(parents=True)
        weight_map = dict[str, str]()
        for number, names in enumerate(_files(tensors, most_file_bytes), 1):
            name = f"model-{number:05d}.safetensors"
            save_file(_apart({each: tensors[each] for each in names}), hidden / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(names, name)
        (hidden / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1) + "\n")
        (hidden / _STABLE).touch()
        remove_step(output_dir, step)  # without STABLE: somebody else was interrupted
        hidden.rename(_place(folder, step))
    except Exception as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise StorageError(f"cannot write {hidden}: {error}.", part=_PART) from error
    for old in [*steps, step][:-keep]:
        with contextlib.suppress(OSError):  # a server may still read it
            remove_step(output_dir, old)
    return _place(folder, step)


def check_keep(keep: int) -> int:
    """Return `keep`. Raises `ConfigError` if it is less than one."""
    if keep < 1:
        raise ConfigError(f"keep is {keep}.", part=_PART, hint="Keep at least the newest broadcast.")
    return keep


def remove_step(output_dir: str | Path, step: int) -> None:
    """Remove the broadcast of `step`, if there is one. Raises `OSError`."""
    place = _place(Path(output_dir) / "broadcasts", step)
    (place / _STABLE).unlink(missing_ok=True)  # first, so that nobody finds half a broadcast
    if place.exists():
        shutil.rmtree(place)


def _place(folder: Path, step: int) -> Path:
    return folder / f"step_{step}"


def _stable_steps(folder: Path) -> list[int]:
    """The steps of the complete broadcasts, in order."""
    return sorted(int(each.parent.name.removeprefix("step_")) for each in folder.glob(f"step_*/{_STABLE}"))


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous `tensors`, with copies of those that are another one, which safetensors refuses to write."""
    apart, starts = dict[str, torch.Tensor](), set[int]()
    for name, tensor in tensors.items():
        each = tensor.contiguous()
        apart[name] = each.clone() if each.data_ptr() in starts else each
        starts.add(each.data_ptr())
    return apart


def _files(tensors: Mapping[str, torch.Tensor], most_bytes: int) -> Iterator[list[str]]:
    """Names of the tensors of each file, in order."""
    names, nbytes = list[str](), 0
    for name, tensor in tensors.items():
        if names and nbytes + tensor.nbytes > most_bytes:
            yield names
            names, nbytes = [], 0
        names.append(name)
        nbytes += tensor.nbytes
    if names:
        yield names
