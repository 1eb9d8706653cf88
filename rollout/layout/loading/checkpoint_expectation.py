"""The tensors that a replica expects in a version: those of the checkpoint that the replica was started from.

Only headers of the checkpoint's files are read. Sources: the safetensors format (https://huggingface.co/docs/safetensors), and
Hugging Face's ``model.safetensors.index.json`` for sharded checkpoints.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.sync import Expectation, ExpectedTensor
from weightlane.sync.version.tensor_spec import SAFETENSORS_DTYPES, is_computed, kept_in_float32

from ..map.layout_map import SourceSpec

_PART = "model directory"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LM_HEAD = "lm_head.weight"
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "backbone.embeddings.weight",
)
"""Endings of the input embedding's name in causal language models of Hugging Face."""


def expectation_of(model: str | os.PathLike[str], *, dtype: torch.dtype, tied_embeddings: bool) -> Expectation:
    """Read which tensors a checkpoint in Hugging Face format has.

    Args:
        model: Checkpoint directory, or the name of a Hugging Face model whose files are already on this machine.
        dtype: Data type the model computes in. A floating-point tensor may arrive in `dtype` or in its dtype on disk, but one
            that is float32 in a checkpoint that is mostly narrower arrives as that: layers may compute with all of it. A
            tensor that is quantised on disk must arrive quantised; a tensor that only arrives quantised is restored in
            `dtype`.
        tied_embeddings: Whether the output embedding is the input embedding. A version then leaves it out.

    Raises:
        ConfigError: The directory or one of its files is missing, broken, or names no tensors.
    """
    directory = _directory(model)
    on_disk = stored_tensors(model)
    castable = _castable(on_disk)
    in_float32 = kept_in_float32({name: stored for name, (_, stored) in on_disk.items()})
    tensors = {
        name: ExpectedTensor(shape, frozenset({stored, dtype} if name in castable - in_float32 else {stored}))
        for name, (shape, stored) in on_disk.items()
    }
    if not tensors:
        raise ConfigError(f"{directory} holds no weights.", part=_PART, hint="Export the model again.")
    tied: dict[str, str] = {}
    if tied_embeddings:
        embedding = _input_embedding(tensors, directory)
        heads = [name for name in tensors if name.endswith(_LM_HEAD)] or [_LM_HEAD]
        tied = dict.fromkeys(heads, embedding)
        tensors |= dict.fromkeys(heads, tensors[embedding])
    return Expectation(tensors=tensors, tied=tied, dtype=dtype)


def expectation_of_config(model_config: Any) -> Expectation:
    """`expectation_of` the checkpoint in vLLM's ``model_config``."""
    tied = bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
    if getattr(model_config, "word_embeddings_untied_by_checkpoint", False):
        # The config ties the embeddings, and the files have both. vLLM ties them if they are equal, after it has loaded them.
        tied = _are_equal(model_config.model)
    return expectation_of(model_config.model, dtype=model_config.dtype, tied_embeddings=tied)


def renames_of(model: Any) -> Any:
    """VLLM's mapper that renames checkpoint tensors to a vLLM model's own names; None where the model has the checkpoint's."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if hasattr(mapper, "get_rename_mapper"):
        return mapper.get_rename_mapper()
    if not hasattr(mapper, "get_unstacked_mapper"):
        return None
    # vLLM 0.28: its mapper still says which tensors are not loaded, by None.
    tables = {name: table for name, table in vars(mapper.get_unstacked_mapper()).items() if isinstance(table, Mapping)}
    renamed = {name: {old: new for old, new in table.items() if new is not None} for name, table in tables.items()}
    return replace(mapper, **renamed)


def place_of(model: Any) -> Callable[[str], str | None] | None:
    """The function that tells where a vLLM model puts a tensor of a checkpoint, if it has one; see `Expectation.place`."""
    renames = renames_of(model)
    # vLLM 0.31 has a public method for one name.
    return None if renames is None else lambda name: next(iter(renames.apply_list([name])), None)


def _are_equal(model: str | os.PathLike[str]) -> bool:
    """Whether the two embeddings in a checkpoint's files are equal, bit for bit."""
    from safetensors import safe_open  # noqa: PLC0415 - comes with the extra `vllm`

    found: dict[str, torch.Tensor] = {}
    for file in checkpoint_files(model):
        with safe_open(file, framework="pt") as opened:
            found |= {
                name: opened.get_tensor(name)
                for name in opened.keys()  # noqa: SIM118 - not a mapping
                if name.endswith((_LM_HEAD, *_EMBEDDINGS))
            }
    heads = [tensor for name, tensor in found.items() if name.endswith(_LM_HEAD)]
    inputs = [tensor for name, tensor in found.items() if not name.endswith(_LM_HEAD)]
    return len(heads) == len(inputs) == 1 and torch.equal(heads[0], inputs[0])


def checkpoint_specs(model: str | os.PathLike[str], dtype: torch.dtype) -> dict[str, SourceSpec]:
    """The tensors of a checkpoint as a trainer sends them by default to a model that computes in `dtype`.

    Raises `ConfigError` as `expectation_of`.
    """
    stored = stored_tensors(model)
    castable = _castable(stored) - kept_in_float32({name: on_disk for name, (_, on_disk) in stored.items()})
    return {
        name: SourceSpec(shape, dtype if name in castable else on_disk) for name, (shape, on_disk) in stored.items()
    }


def _castable(stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> set[str]:
    """The tensors that may arrive in another dtype than on disk: all but quantised tensors and their scales."""
    quantised = {name for name, (_, dtype) in stored.items() if dtype.itemsize == 1}

    def is_castable(name: str, dtype: torch.dtype) -> bool:
        base, mark, _ = name.rpartition("_scale")
        return dtype.is_floating_point and name not in quantised and not (mark and base in quantised)

    return {name for name, (_, dtype) in stored.items() if is_castable(name, dtype)}


def stored_tensors(model: str | os.PathLike[str]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every weight in a checkpoint's files. Raises as `expectation_of`.

    Layers that predict further tokens (DeepSeek-V3 has one) are left out: vLLM loads them into draft models only.
    """
    layers = _trained_layers(_directory(model))
    return {
        name: (shape, on_disk)
        for file in checkpoint_files(model)
        for name, shape, on_disk in _header(file)
        if not is_computed(name) and _layer_of(name) < layers
    }


def _trained_layers(directory: Path) -> float:
    """The number of decoder layers before those that predict further tokens; infinite if no layers do."""
    try:
        config = json.loads((directory / "config.json").read_text())
        return int(config["num_hidden_layers"]) if config.get("num_nextn_predict_layers") else math.inf
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return math.inf  # vLLM refuses a broken config when it loads the model.


def _layer_of(name: str) -> int:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _directory(model: str | os.PathLike[str]) -> Path:
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_absolute() or not isinstance(model, str):
        raise ConfigError(
            f"{path} is not a directory.", part=_PART, hint="Name the directory of a Hugging Face checkpoint."
        )
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - comes with vLLM; a directory needs none of it

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError) as cause:
        raise ConfigError(
            f"{model!r} is neither a directory nor a model that was downloaded before.",
            part=_PART,
            hint="Name the directory of a Hugging Face checkpoint.",
        ) from cause


def checkpoint_files(model: str | os.PathLike[str]) -> list[Path]:
    """The safetensors files of a checkpoint. Raises as `expectation_of`."""
    directory = _directory(model)
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as cause:
            raise ConfigError(
                f"{index} is not a safetensors index.", part=_PART, hint="Export the model again."
            ) from cause
        # Only plain names: an index must not lead out of its directory.
        files = [directory / Path(str(name)).name for name in names]
    else:
        files = [directory / _SINGLE]
    for file in files:
        if not _is_file(file):
            raise ConfigError(
                f"{file} does not exist.",
                part=_PART,
                hint="weightlane needs safetensors files; export the model again.",
            )
    return files


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # The name is not possible on this file system.
        return False


def _header(file: Path) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - comes with the extra `vllm`

    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                view = opened.get_slice(name)
                yield name, tuple(view.get_shape()), SAFETENSORS_DTYPES[view.get_dtype()]
    except KeyError as cause:
        raise ConfigError(f"{file} holds a tensor of type {cause}, which is not supported.", part=_PART) from cause
    except (SafetensorError, OSError) as cause:
        raise ConfigError(f"{file} is broken: {cause}.", part=_PART, hint="Export or download it again.") from cause


def _input_embedding(tensors: dict[str, ExpectedTensor], directory: Path) -> str:
    found = [name for name in tensors if name.endswith(_EMBEDDINGS)]
    if len(found) != 1:
        raise ConfigError(
            f"{directory} has tied embeddings, but the input embedding is not unique: {', '.join(found) or 'none found'}.",
            part=_PART,
            hint="Set tie_word_embeddings to false and export both embeddings.",
        )
    return found[0]
