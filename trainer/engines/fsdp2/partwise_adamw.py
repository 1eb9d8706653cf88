"""AdamW in a handful of parts, so that a step can begin with parameters that a publication has already read.

A snapshot copies the checkpoint tensors in their order. An optimizer that steps everything at once has to wait for the full
snapshot; one that steps a part at a time only waits for the tensors of its next part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..hf.names import CheckpointRun
from ..optimizer_settings import AdamParams, init_optimizer_state

PARTS = 8
"""Most parts that a model is split into: each costs one launch of the fused kernel and one call of the fence."""


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """Parameters that follow each other in the checkpoint and are stepped together."""

    parameters: tuple[torch.nn.Parameter, ...]
    names: tuple[str, ...]
    """The checkpoint tensors that `parameters` are saved as, in their order; several for a fused parameter."""


def split_into_parts(
    parameters: Mapping[str, torch.nn.Parameter], runs: Sequence[CheckpointRun], most: int = PARTS
) -> list[ParameterPart]:
    """Split `parameters` into at most `most` parts of about equal bytes, in the order of the checkpoint.

    Sizes are those of the full tensors, so every rank of a sharded model gets the same parts.

    Args:
        parameters: what the optimizer changes, by in-memory name, tied ones once.
        runs: the checkpoint tensors of the model, ordered; those of anything not in `parameters` never change and are left out.
        most: number of parts, at least 1. There are fewer if a parameter is larger than an equal share.
    """
    names: dict[str, list[str]] = {}
    for run in runs:
        if run.source in parameters:
            names.setdefault(run.source, []).append(run.name)
    total = sum(_whole_bytes(parameters[source]) for source in names)
    members: dict[int, list[str]] = {}
    before = 0
    for source in names:
        size = _whole_bytes(parameters[source])
        # Chosen by the tensor's middle: parts stay in order, and a large tensor pulls no other into its own part.
        members.setdefault((2 * before + size) * most // (2 * total), []).append(source)
        before += size
    return [
        ParameterPart(
            tuple(parameters[source] for source in sources), tuple(name for source in sources for name in names[source])
        )
        for sources in members.values()
    ]


class PartwiseAdamW:
    """One fused AdamW per part. A step's result is, bit for bit, that of one AdamW over all parameters.

    Args:
        parts: every parameter in exactly one of them.
    """

    def __init__(self, parts: Iterable[ParameterPart]) -> None:
        self._parts = [(part.names, torch.optim.AdamW(_by_mesh(part.parameters), fused=True)) for part in parts]
        for _, optimizer in self._parts:
            init_optimizer_state(optimizer)

    def step(self, params: AdamParams, before_change: Callable[[Collection[str]], None]) -> None:
        """Step each part with `params`, directly after calling `before_change` with the names of its checkpoint tensors."""
        for names, optimizer in self._parts:
            params.set_in(optimizer)
            before_change(names)
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for _, optimizer in self._parts:
            optimizer.zero_grad()

    def state_of(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return AdamW's live state of `parameter`: ``step``, ``exp_avg``, ``exp_avg_sq``. KeyError if it is in no part."""
        for _, optimizer in self._parts:
            if parameter in optimizer.state:
                state: dict[str, torch.Tensor] = optimizer.state[parameter]
                return state
        raise KeyError("the parameter is in no part of the optimizer")


def _by_mesh(parameters: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Group parameters by their mesh of ranks: one fused kernel can step those on the same mesh."""
    groups: dict[object, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return [{"params": group} for group in groups.values()]


def _whole_bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()
