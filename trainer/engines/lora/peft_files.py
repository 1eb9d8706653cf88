"""Adapters in PEFT's format: a directory with ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from weightlane.ckpt_engines import ConfigError

from ...config import LoraConfig
from ..hf.partial_dir import storage_errors
from .sites import PART, LoraSite

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
"""A file next to PEFT's own: AdamW's moments by `AdapterSlice.key`, and their step count."""
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_alpha",
    "lora_dropout",  # which only training has
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",  # means nothing without use_qalora
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
"""Keys of PEFT's configuration that may have any value; any other key that is set requests an unsupported feature."""
_STARTS = (True, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the model's own weights as they are. Others, such as PiSSA, take B A from them."""
_NOTHING: tuple[object, ...] = (None, False, 0, "", "none", [], {})


def peft_name(module: str, matrix: str) -> str:
    """Return PEFT's name for the tensor A or B of a linear layer."""
    return f"{_PREFIX}{module}.lora_{matrix}.weight"


def read_peft(
    directory: Path, config: LoraConfig, sites: Sequence[LoraSite], modules: Collection[str]
) -> dict[str, torch.Tensor]:
    """Read the full float32 A and B of `sites`, by ``module|A`` and ``module|B``, on the CPU.

    `modules` are the names of all layers, on any rank, that can have an adapter.

    Raises:
        ConfigError: The directory holds no adapter of this configuration and model; it names the key or tensor.
        StorageError: A file cannot be read.
    """
    from safetensors.torch import load_file  # noqa: PLC0415 - optional

    _check_config(directory, _read_config(directory), config)
    path = directory / _TENSORS
    with storage_errors("read", path):
        tensors: dict[str, torch.Tensor] = load_file(_existing(path))
    found: dict[str, torch.Tensor] = {}
    wanted = {site.module: site for site in sites}
    targets = {site.target for site in sites}
    for key, tensor in tensors.items():
        # PEFT adds ".base_layer" to the name of a layer that has a further wrapper.
        match = _TENSOR.fullmatch(key.removeprefix(_PREFIX).replace(".base_layer", ""))
        if match is None:
            raise _error(f"{directory} holds the tensor {key}, which is no A or B of a linear layer.")
        module, matrix = match["module"], match["matrix"]
        if module not in modules:
            raise _error(
                f"{directory} holds the tensor {key}, but the model's decoder layers have no such linear layer."
            )
        if (target := module.rpartition(".")[2]) not in targets:
            raise _error(f"{directory} holds the tensor {key}, but {target} is none of the targets.")
        if module not in wanted:
            continue  # another pipeline stage has it
        if tuple(tensor.shape) != (shape := wanted[module].shape(matrix, config.rank)):
            raise _error(f"the tensor {key} in {directory} has shape {list(tensor.shape)} instead of {list(shape)}.")
        found[f"{module}|{matrix}"] = tensor.float()
    for module in wanted:
        for matrix in "AB":
            if f"{module}|{matrix}" not in found:
                raise _error(f"{directory} lacks the tensor {peft_name(module, matrix)}.")
    return found


def write_peft(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    config: LoraConfig,
    targets: Collection[str],
    model_dir: Path,
    step: int | None = None,
) -> None:
    """Write the files of an adapter for `model_dir` into `directory`.

    `tensors` are full, by `AdapterSlice.key`. With `step`, the number of steps taken, the moments are written, too.
    """
    from safetensors.torch import save_file  # noqa: PLC0415 - optional

    about = {
        "base_model_name_or_path": str(model_dir),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    named, moments = {}, {}
    for key, tensor in tensors.items():
        module, matrix, kind = key.split("|")
        if kind == "weight":
            named[peft_name(module, matrix)] = tensor.contiguous()
        else:
            moments[key] = tensor.contiguous()
    save_file(named, directory / _TENSORS, metadata={"format": "pt"})
    if step is not None:
        save_file(moments, directory / _OPTIMIZER, metadata={"step": str(step)})
    (directory / _CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def saved_config(directory: Path) -> LoraConfig:
    """Return the configuration of the adapter in `directory`. Raises as `read_peft`."""
    found = _read_config(directory)
    targets = found.get("target_modules")
    names = {str(each).rpartition(".")[2] for each in targets} if isinstance(targets, list) else set()
    try:
        return LoraConfig.model_validate(
            {"rank": found.get("r"), "alpha": found.get("lora_alpha"), "targets": tuple(sorted(names))}
        )
    except ValidationError as cause:
        raise _error(f"{directory / _CONFIG} has no valid r and lora_alpha: {cause.errors()[0]['msg']}.") from cause


def read_optimizer(directory: Path) -> tuple[dict[str, torch.Tensor], int] | None:
    """Read the moments, by `AdapterSlice.key`, and the steps that `write_peft` wrote with an adapter; None without any."""
    from safetensors import safe_open  # noqa: PLC0415 - optional

    path = directory / _OPTIMIZER
    if not path.exists():
        return None
    try:
        with storage_errors("read", path), safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in list(file.keys())}, int((file.metadata() or {})["step"])
    except (KeyError, ValueError) as cause:
        raise _error(f"{path} does not say how many steps its moments have seen.") from cause


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / _CONFIG
    with storage_errors("read", path):
        data = _existing(path).read_bytes()
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as cause:
        raise _error(f"{path} is not valid JSON: {cause}.") from cause
    if not isinstance(found, dict):
        raise _error(f"{path} holds a {type(found).__name__}, not an object.")
    return found


def _check_config(directory: Path, found: Mapping[str, Any], config: LoraConfig) -> None:
    if found.get("peft_type") != "LORA":
        raise _error(f"the adapter in {directory} has peft_type {found.get('peft_type')!r} instead of 'LORA'.")
    for key, value in found.items():
        is_start = key == "init_lora_weights" and value in _STARTS
        if key not in _HARMLESS and value not in _NOTHING and not is_start:
            raise _error(f"the adapter in {directory} has {key} = {value!r}, which this engine does not do.")
    targets = found.get("target_modules")
    theirs = {str(each).rpartition(".")[2] for each in targets} if isinstance(targets, list) else None
    for key, theirs_, ours in (
        ("rank", found.get("r"), config.rank),
        ("alpha", found.get("lora_alpha"), config.alpha),
        ("targets", theirs, set(config.targets)),
    ):
        # If theirs is a pattern, or ours is empty, the names of the tensors are checked instead.
        if theirs_ != ours and not (key == "targets" and (theirs is None or not config.targets)):
            raise _error(
                f"the adapter in {directory} has {key} {_plain(theirs_)}, the configuration {_plain(ours)}.",
                f"Set {key} of the adapter's LoraConfig to what {_CONFIG} says.",
            )


def _plain(value: Any) -> str:
    return ", ".join(sorted(value)) if isinstance(value, set) else repr(value)


def _existing(path: Path) -> Path:
    if not path.exists():
        raise _error(f"{path.parent} has no {path.name}.")
    return path


def _error(
    message: str, hint: str = "Use an adapter that was trained for this model, as PEFT saves it."
) -> ConfigError:
    return ConfigError(message, part=PART, hint=hint)
