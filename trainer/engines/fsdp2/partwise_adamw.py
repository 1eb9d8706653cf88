"""AdamW in a handful of parts, so that a step can begin with parameters that a publication has already read.

A snapshot copies the checkpoint tensors in their order. An optimizer that steps everything at once has to wait for the full
snapshot; one that steps a part at a time only waits for the tensors of its next part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..hf.names import CheckpointRun
from ..optimizer_settings import AdamParams, init_optimizer_state

PARTS = 8
"""Most parts that a model is split into: each costs one launch of the fused kernel and one call of the fence."""


class PartwiseAdamW:
    """One fused AdamW per part. A step's result is, bit for bit, that of one AdamW over all parameters.

    Args:
        parameters: What the optimizer changes, by in-memory name, tied ones once.
        runs: The checkpoint tensors of the model, in order; those of anything not in `parameters` never change.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], runs: Sequence[CheckpointRun]) -> None:
        names: dict[str, list[str]] = {}
        """The checkpoint tensors that each parameter is saved as; several for a fused one."""
        for run in runs:
            if run.source in parameters:
                names.setdefault(run.source, []).append(run.name)
        self._parts: list[tuple[list[str], torch.optim.AdamW]] = []
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        """AdamW's live state of each parameter, by name: ``step``, ``exp_avg``, ``exp_avg_sq``."""
        for sources in _split({source: parameters[source] for source in names}):
            optimizer = torch.optim.AdamW(_by_mesh(parameters[source] for source in sources), fused=True)
            init_optimizer_state(optimizer)
            self.state |= {source: optimizer.state[parameters[source]] for source in sources}
            self._parts.append(([name for source in sources for name in names[source]], optimizer))

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


def _split(parameters: Mapping[str, torch.nn.Parameter]) -> Iterable[list[str]]:
    """Split `parameters` into at most `PARTS` parts of about equal bytes, in their order.

    Sizes are those of the full tensors, so every rank of a sharded model gets the same parts. There are fewer if a parameter is
    larger than an equal share.
    """
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in parameters.items()}
    members: dict[int, list[str]] = {}
    before, total = 0, sum(sizes.values())
    for name, size in sizes.items():
        # Chosen by the tensor's middle: parts stay in order, and a large tensor pulls no other into its own part.
        members.setdefault((2 * before + size) * PARTS // (2 * total), []).append(name)
        before += size
    return members.values()


def _by_mesh(parameters: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Group parameters by their mesh of ranks: one fused kernel can step those on the same mesh."""
    groups: dict[object, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return [{"params": group} for group in groups.values()]
