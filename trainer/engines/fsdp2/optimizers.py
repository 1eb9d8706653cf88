"""Optimizers by the names of ``trainer.optimizer``, over parameters that are plain or sharded ``DTensor``s."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from weightlane.ckpt_engines import ConfigError

from ...config import TrainerConfig
from ..optimizer_settings import MOMENTS

_MUON_RATE = 0.2
"""Muon's step has about the size of AdamW's at the same learning rate if it is so much times the root of a matrix's larger
dimension (arXiv 2502.16982, equation 4; torch's ``match_rms_adamw``)."""
_MATRIX = 2
"""Dimensions of what Muon steps."""
_CONVERTED = 1 << 20
"""Elements that are converted to 8 bits, or from them, at a time."""
_BLOCK = 256
"""Elements of a moment that share a scale in 8 bits; the memory of a moment that they do not divide stays float32."""


def optimizers_of(
    config: TrainerConfig, parameters: Mapping[str, torch.nn.Parameter], matrices: Collection[str]
) -> list[AdamW | Muon]:
    """Return those that step `parameters`, by in-memory name; `matrices` names what Muon takes if it is asked for."""
    muon = {name: each for name, each in parameters.items() if config.optimizer == "muon" and name in matrices}
    others = {name: each for name, each in parameters.items() if name not in muon}
    return [kind(config, each) for kind, each in ((Muon, muon), (AdamW, others)) if each]


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW, over what this rank holds of each parameter.

    Its moments are held as `config.optimizer` says, and are float32 only while a step is made.
    """

    def __init__(self, config: TrainerConfig, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        super().__init__(list(parameters.values()), fused=True)
        self._names = {parameter: name for name, parameter in parameters.items()}
        hold = _HOLD[config.optimizer]
        for parameter in parameters.values():
            local = _local(parameter)
            self.state[parameter] = {
                "step": torch.zeros((), device=local.device),
                **{key: hold(torch.zeros_like(local), key) for key in MOMENTS},
            }

    @property
    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """This rank's part of the moments and the step count of each parameter, by name; float32 on the CPU if held in 8 bits."""
        return {
            name: {key: _plain(each) for key, each in self.state[parameter].items()}
            for parameter, name in self._names.items()
        }

    def restore(self, moments: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take those of `moments` that were copies."""
        for parameter, name in self._names.items():
            for key, moment in self.state[parameter].items():
                if _is_in_8_bits(moment):
                    _compress(moments[name][key].to(moment.device), moment)

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors that hold the state on this rank."""
        held = [each for parameter in self._names for each in self.state[parameter].values()]
        inside = [[each.codes, each.scale, each.qmap] if _is_in_8_bits(each) else [each] for each in held]
        return [tensor for tensors in inside for tensor in tensors]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's takes closures
        """Step every parameter that has a gradient."""
        del closure
        (group,) = self.param_groups
        gradients = {parameter: parameter.grad for parameter in group["params"] if parameter.grad is not None}
        states = [self.state[parameter] for parameter in gradients]
        wide = {key: [_in_32_bits(state[key]) for state in states] for key in MOMENTS}
        adamw(
            [_local(parameter) for parameter in gradients],
            [_local(_placed_as(parameter, gradient)) for parameter, gradient in gradients.items()],
            wide["exp_avg"],
            wide["exp_avg_sq"],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for key, moments in wide.items():
            for moment, state in zip(moments, states, strict=True):
                if moment is not state[key]:
                    _copy(moment, state[key])


class Muon(torch.optim.Optimizer):
    """torch's Muon with the learning rates of AdamW, over sharded matrices: each is orthogonalised whole, on every rank.

    The same gradients then give the same step, bit for bit, on any number of ranks. torch's own, over ``DTensor``s, would round
    differently and communicate at every iteration. A step is collective: if one rank fails before it, the others wait for it
    until ``trainer.collective_timeout_s``.
    """

    def __init__(self, config: TrainerConfig, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        super().__init__([{"params": list(parameters.values())}], {"lr": 0.0, "weight_decay": 0.0})
        self._momentum = config.muon_momentum
        self._names = {parameter: name for name, parameter in parameters.items()}
        for parameter in parameters.values():
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}

    @property
    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """This rank's part of the momentum of each matrix, by name."""
        return {
            name: {"momentum_buffer": _local(self.state[parameter]["momentum_buffer"])}
            for parameter, name in self._names.items()
        }

    def restore(self, moments: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Do nothing: `moments` are no copies."""

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors that hold the state on this rank."""
        return [moment for state in self.moments.values() for moment in state.values()]

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


def check_optimizer(config: TrainerConfig) -> None:
    """Raise `ConfigError` if the optimizer needs a library that is not installed."""
    if config.optimizer == "adamw_8bit" and find_spec("torchao") is None:
        raise ConfigError(
            "trainer.optimizer is adamw_8bit, which needs torchao.",
            part="trainer",
            hint="Run pip install 'weightlane[optimizers]', or choose adamw_bf16.",
        )


def _in_8_bits(moment: torch.Tensor, key: str) -> torch.Tensor:
    if moment.numel() % _BLOCK or not moment.numel() or not moment.is_contiguous():
        return moment
    from torchao.optim.subclass_8bit import OptimState8bit  # noqa: PLC0415 - optional

    signed = key == "exp_avg"  # squares are not negative
    held: torch.Tensor = OptimState8bit.zeros(moment.shape, signed, _BLOCK, moment.device, moment.dtype)
    return held


_HOLD: Mapping[str, Callable[[torch.Tensor, str], torch.Tensor]] = {
    "adamw": lambda moment, _: moment,
    "adamw_bf16": lambda moment, _: moment.to(torch.bfloat16),
    "adamw_8bit": _in_8_bits,
    "muon": lambda moment, _: moment,
}
"""How moments of zeros, float32, are held between steps, by the name of the optimizer."""


def _compress(values: torch.Tensor, moment: Any) -> None:
    """Hold float32 `values` in the 8 bits of `moment`, without a change if they come out of 8 bits with the same blocks.

    torchao's codes reach 1 and -0.993 of a block's scale. So what comes out of a block whose largest value was negative would get
    a smaller scale and change again; the scale that it had is found instead.
    """
    from torchao.optim.quant_utils import dequant_with_qmap, quantize_8bit_with_qmap  # noqa: PLC0415 - optional

    lowest = moment.qmap.min().abs()
    for values_part, part in _parts(values, moment):
        part.copy_(values_part)
        blocks = values_part.view(-1, _BLOCK)
        largest = blocks.abs().amax(-1)
        before = largest / lowest if moment.signed else largest
        above, below = torch.full_like(before, torch.inf), torch.zeros_like(before)
        for scale in (before, torch.nextafter(before, above), torch.nextafter(before, below), largest):
            codes = quantize_8bit_with_qmap(blocks / scale[:, None], moment.qmap)
            same = (dequant_with_qmap(codes, moment.qmap, scale).view_as(blocks) == blocks).all(-1)
            part.codes.view_as(blocks)[same] = codes.view_as(blocks)[same]
            part.scale[same] = scale[same]


def _parts(*moments: torch.Tensor) -> Iterable[tuple[Any, ...]]:
    """Split flattened tensors, some in 8 bits: torchao takes many times the memory of what it converts at once."""
    for first in range(0, moments[0].numel(), _CONVERTED):
        yield tuple(_part(moment, first, first + _CONVERTED) for moment in moments)


def _part(moment: Any, first: int, last: int) -> torch.Tensor:
    if not _is_in_8_bits(moment):
        part: torch.Tensor = moment.view(-1)[first:last]
        return part
    codes, scale = moment.codes.view(-1)[first:last], moment.scale[first // _BLOCK : last // _BLOCK]
    held: torch.Tensor = type(moment)(codes, scale, moment.qmap, moment.signed, moment.dtype)
    return held


def _copy(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy a moment, of which either may be in 8 bits."""
    if not (_is_in_8_bits(source) or _is_in_8_bits(into)):
        into.copy_(source)
        return
    for source_part, into_part in _parts(source, into):
        into_part.copy_(source_part.dequantize() if _is_in_8_bits(source_part) else source_part)


def _is_in_8_bits(moment: torch.Tensor) -> bool:
    return hasattr(moment, "codes")


def _placed_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def _in_32_bits(moment: torch.Tensor) -> torch.Tensor:
    if moment.dtype == torch.float32 and not _is_in_8_bits(moment):
        return moment
    wide = torch.empty(moment.shape, device=moment.device)
    _copy(moment, wide)
    return wide


def _plain(moment: torch.Tensor) -> torch.Tensor:
    if not _is_in_8_bits(moment):
        return moment
    plain = torch.empty(moment.shape)
    _copy(moment, plain)
    return plain


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
