"""A model's optimizer in a handful of parts, so that a step can begin with parameters that a publication has already read.

A snapshot copies the checkpoint tensors in their order. An optimizer that steps everything at once has to wait for the full
snapshot; one that steps a part at a time only waits for the tensors of its next part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch

from ...config import TrainerConfig
from ..hf.checkpoint import CheckpointRun
from ..optimizers.adamw import AdamW
from ..optimizers.settings import AdamParams
from .optimizers import Muon, optimizers_of

PARTS = 8
"""Most parts that a model is split into: each costs one launch of the fused kernel and one call of the fence."""


class PartwiseOptimizer:
    """The optimizer of ``trainer.optimizer``, once per part. A step's result is, bit for bit, that of one over all parameters.

    Args:
        config: The optimizer and its settings.
        parameters: What it changes, by in-memory name, tied ones once.
        matrices: Names of those in `parameters` that Muon takes, if it is asked for.
        runs: The checkpoint tensors of the model, in order; those of anything not in `parameters` never change.
    """

    def __init__(
        self,
        config: TrainerConfig,
        parameters: Mapping[str, torch.nn.Parameter],
        matrices: Collection[str],
        runs: Sequence[CheckpointRun],
    ) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}
        names: dict[str, list[str]] = {}
        """The checkpoint tensors that each parameter is saved as; several for a fused one."""
        for run in runs:
            if run.source in parameters:
                names.setdefault(run.source, []).append(run.name)
        self._parts = [
            (
                [name for source in sources for name in names[source]],
                optimizers_of(config, {source: parameters[source] for source in sources}, matrices),
            )
            for sources in _split({source: parameters[source] for source in names})
        ]

    @property
    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """This rank's part of the moments of each parameter, and its step count as ``step``, by name.

        They are those that the next step works with, but for `adamw_8bit`: float32 copies, which `restore` takes back.
        """
        return {name: optimizer.moments_of(parameter) for name, parameter, optimizer in self._stepped()}

    def restore(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take what was changed in copies of `state`."""
        for name, parameter, optimizer in self._stepped():
            optimizer.restore(parameter, state[name])

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors that hold the state on this rank."""
        return [tensor for optimizer in self._optimizers for tensor in optimizer.memory]

    def step(self, params: AdamParams, before_change: Callable[[Collection[str]], None]) -> None:
        """Step each part with `params`, directly after calling `before_change` with the names of its checkpoint tensors."""
        for names, optimizers in self._parts:
            before_change(names)
            for optimizer in optimizers:
                params.set_in(optimizer)
                optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def _stepped(self) -> Iterator[tuple[str, torch.nn.Parameter, AdamW | Muon]]:
        for optimizer in self._optimizers:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                yield self._names[parameter], parameter, optimizer

    @property
    def _optimizers(self) -> list[AdamW | Muon]:
        return [optimizer for _, optimizers in self._parts for optimizer in optimizers]


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
