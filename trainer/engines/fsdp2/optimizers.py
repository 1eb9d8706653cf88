"""The optimizers that ``trainer.optimizer`` names, Muon among them, over plain parameters or sharded ``DTensor``s."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate

from ...config import TrainerConfig
from ..optimizers.adamw import AdamW, local_part
from ..optimizers.settings import MOMENTS

_MUON_RATE = 0.2
"""Muon's step has about the size of AdamW's at the same learning rate if it is so much times the root of a matrix's larger
dimension (arXiv 2502.16982, equation 4; torch's ``match_rms_adamw``)."""
_MATRIX = 2
"""Dimensions of what Muon steps."""


def optimizers_of(
    config: TrainerConfig, parameters: Mapping[str, torch.nn.Parameter], matrices: Collection[str]
) -> list[AdamW | Muon]:
    """Return those that step `parameters`, by in-memory name; `matrices` names what Muon takes if it is asked for."""
    taken = {name for name in parameters if config.optimizer == "muon" and name in matrices}
    muon = [each for name, each in parameters.items() if name in taken]
    others = [each for name, each in parameters.items() if name not in taken]
    made: list[AdamW | Muon] = [Muon(config.muon_momentum, muon)] if muon else []
    return [*made, AdamW(config.optimizer, [{"params": others}])] if others else made


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


def moment_names(config: TrainerConfig, name: str, matrices: Collection[str]) -> tuple[str, ...]:
    """Return torch's names for the moments of parameter `name`."""
    return ("momentum_buffer",) if config.optimizer == "muon" and name in matrices else MOMENTS


def is_matrix(parameter: torch.nn.Parameter) -> bool:
    """Return whether Muon can step `parameter`. It cannot step several experts in one tensor."""
    return parameter.ndim == _MATRIX
