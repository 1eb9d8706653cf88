"""A model's optimizer in a handful of parts, over plain parameters or sharded ``DTensor``s, and Muon.

A snapshot copies the checkpoint tensors in their order. An optimizer that steps everything at once has to wait for the full
snapshot; one that steps a part at a time only waits for the tensors of its next part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ...config import TrainerConfig
from ..hf.checkpoint import CheckpointRun
from ..optimizers.adamw import AdamW, local_part
from ..optimizers.settings import MOMENTS, AdamParams

PARTS = 8
"""Most parts that a model is split into: each costs one launch of the fused kernel and one call of the fence."""
_MUON_RATE = 0.2
"""Muon's step has about the size of AdamW's at the same learning rate if it is so much times the root of a matrix's larger
dimension (arXiv 2502.16982, equation 4; torch's ``match_rms_adamw``)."""


class PartwiseOptimizer:
    """The optimizer of ``trainer.optimizer``, once per part. A step's result is, bit for bit, that of one over all parameters.

    Args:
        config: The optimizer and its settings.
        parameters: What it changes, by in-memory name, tied ones once.
        matrices: Names of those in `parameters` that Muon takes, if it is asked for: no experts in one tensor.
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
                _optimizers_of(config, {source: parameters[source] for source in sources}, matrices),
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


def moment_names(config: TrainerConfig, name: str, matrices: Collection[str]) -> tuple[str, ...]:
    """Return torch's names for the moments of parameter `name`; `matrices` are what Muon takes."""
    return ("momentum_buffer",) if config.optimizer == "muon" and name in matrices else MOMENTS


def clip_gradients(parameters: Sequence[torch.nn.Parameter], most: float) -> float:
    """Scale gradients down to a global L2 norm of at most `most`. Returns the norm before. Collective.

    Parameters are grouped by mesh, because torch's own `clip_grad_norm_` takes one mesh only.
    """
    groups: dict[object, list[torch.nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            groups[parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None].append(parameter)
    norms = []
    for group in groups.values():
        norm = get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    for group in groups.values():
        clip_grads_with_norm_(group, most, total)
    return float(total)


class Muon(torch.optim.Optimizer):
    """torch's Muon with the learning rates of AdamW, over sharded matrices: each is orthogonalised whole, on every rank.

    The same gradients then give the same step, bit for bit, on any number of ranks. torch's own, over ``DTensor``s, would round
    differently and communicate at every iteration. A step is collective: if one rank fails before it, the others wait for it
    until ``trainer.collective_timeout_s``.
    """

    def __init__(self, momentum: float, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__([{"params": parameters}], {"lr": 0.0, "weight_decay": 0.0})
        self._momentum = momentum
        for parameter in parameters:
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}

    def moments_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's part of the momentum of a matrix."""
        return {"momentum_buffer": local_part(self.state[parameter]["momentum_buffer"])}

    def restore(self, parameter: torch.Tensor, moments: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: `moments` are no copies."""

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors that hold the state on this rank."""
        return [local_part(state["momentum_buffer"]) for state in self.state.values()]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's takes closures
        """Step every matrix that has a gradient."""
        from torch.optim import _muon  # noqa: PLC0415 - private parts, for those only who ask for Muon

        del closure
        settings = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C), _muon.DEFAULT_NS_STEPS, _muon.EPS
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter]["momentum_buffer"]
                momentum.lerp_(parameter.grad, 1 - self._momentum)
                update = parameter.grad.lerp(momentum, self._momentum)
                if isinstance(update, DTensor):
                    update = update.full_tensor()
                whole = _muon._zeropower_via_newtonschulz(update, *settings)
                if isinstance(parameter, DTensor):
                    everywhere = [Replicate()] * parameter.device_mesh.ndim
                    whole = DTensor.from_local(whole, parameter.device_mesh, everywhere, run_check=False)
                    whole = whole.redistribute(placements=parameter.placements)
                rate = group["lr"] * _MUON_RATE * math.sqrt(max(parameter.shape))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(whole, alpha=-rate)


def _optimizers_of(
    config: TrainerConfig, parameters: Mapping[str, torch.nn.Parameter], matrices: Collection[str]
) -> list[AdamW | Muon]:
    """Return those that step `parameters`, by in-memory name."""
    taken = {name for name in parameters if config.optimizer == "muon" and name in matrices}
    muon = [each for name, each in parameters.items() if name in taken]
    others = [each for name, each in parameters.items() if name not in taken]
    made: list[AdamW | Muon] = [Muon(config.muon_momentum, muon)] if muon else []
    return [*made, AdamW(config.optimizer, [{"params": others}])] if others else made


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
