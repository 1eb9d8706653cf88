"""Map each tensor of a Hugging Face checkpoint to a contiguous run of an in-memory parameter.

transformers fuses some tensors on loading (such as the experts of a mixture of experts) and splits them again on saving. The
rollout expects the names on disk. transformers' own reverse conversion is therefore run once, on tensors of the meta device, and
each result is recognised as a view of the parameter it came from. Nothing is allocated or copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightlane.ckpt_engines import ConfigError


@dataclass(frozen=True, slots=True)
class CheckpointRun:
    """One checkpoint tensor as a contiguous run of an in-memory tensor."""

    name: str
    """Name on disk."""
    shape: tuple[int, ...]
    source: str
    """Name of the parameter or buffer in memory."""
    offset: int
    """First element within the row-major flattened source."""


class _CopiesAreViews(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its __init_subclass__ untyped
    """Makes ``contiguous()`` and ``clone()`` return their argument, so that a slice stays a view of its source."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def checkpoint_runs(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[CheckpointRun]:
    """List the checkpoint tensors as which `tensors` (in-memory names, tied ones once) are saved, in the order of `tensors`.

    Raises `ConfigError` naming the tensor that is not saved as contiguous runs, but for example as a transpose.
    """
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - optional, slow to import

    shadows = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    sources = {shadow.untyped_storage()._cdata: name for name, shadow in shadows.items()}
    position = {name: index for index, name in enumerate(shadows)}
    with _CopiesAreViews():  # type: ignore[no-untyped-call]  # torch leaves the base class's __init__ untyped
        saved: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(shadows))
    runs = []
    for name, tensor in saved.items():
        source = sources.get(tensor.untyped_storage()._cdata)
        if source is None or not tensor.is_contiguous():
            raise ConfigError(
                f"transformers saves {name} in a form that is not a contiguous part of one parameter.",
                part="fsdp2 engine",
                hint="This architecture's weights cannot be published yet; use one whose checkpoint layout is plain.",
            )
        runs.append(CheckpointRun(name, tuple(tensor.shape), source, int(tensor.storage_offset())))
    covered = dict.fromkeys(shadows, 0)
    for run in runs:
        covered[run.source] += torch.Size(run.shape).numel()
    for name, shadow in shadows.items():
        if covered[name] != shadow.numel():
            raise ConfigError(f"transformers does not save all of {name}.", part="fsdp2 engine")
    return sorted(runs, key=lambda run: (position[run.source], run.offset))
