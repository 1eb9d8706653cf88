"""AdamW as ``trainer.optimizer`` names it: torch's fused kernel, with moments that may be held in fewer bits between steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from weightlane.ckpt_engines import ConfigError

from ...config import OptimizerName
from .settings import MOMENTS

_CONVERTED = 1 << 20
"""Elements that are converted to 8 bits, or from them, at a time."""
_STEPPED = 1 << 25
"""Most elements that are stepped at a time, unless one tensor has more: moments that are held in fewer bits are float32 then."""
_BLOCK = 256
"""Elements of a moment that share a scale in 8 bits; the memory of a moment that they do not divide stays float32."""


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW, over what this rank holds of each parameter.

    Its moments are held as the optimizer of that name holds them, and are float32 only while a step is made.

    Args:
        name: One of ``trainer.optimizer``. For ``muon``, these are the parameters that Muon does not take.
        groups: torch's groups of float32 parameters, plain or sharded ``DTensor``s.
    """

    def __init__(self, name: OptimizerName, groups: Iterable[Mapping[str, Any]]) -> None:
        check_optimizer(name)
        super().__init__([{"params": []}], fused=True)
        # torch would refuse the master weights of megatron-core, which are computed from its parameters.
        self.param_groups = [{**self.defaults, **group} for group in groups]
        for parameter in self._parameters:
            local = local_part(parameter)
            self.state[parameter] = {
                "step": torch.zeros((), device=local.device),
                # squares are not negative
                **{key: _held(torch.zeros_like(local), name, signed=key == "exp_avg") for key in MOMENTS},
            }

    def moments_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's part of the moments of a parameter, and its step count; float32 copies on the CPU if held in 8 bits."""
        return {key: _out_of_8_bits(each, torch.device("cpu")) for key, each in self.state[parameter].items()}

    def restore(self, parameter: torch.Tensor, moments: Mapping[str, torch.Tensor]) -> None:
        """Hold those of `moments_of` that are copies, with what was changed in them."""
        for key, moment in self.state[parameter].items():
            if _is_in_8_bits(moment):
                _compress(moments[key].to(moment.device), moment)

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors that hold the state on this rank."""
        held = [each for parameter in self._parameters for each in self.state[parameter].values()]
        inside = [[each.codes, each.scale, each.qmap] if _is_in_8_bits(each) else [each] for each in held]
        return [tensor for tensors in inside for tensor in tensors]

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's takes closures
        """Step every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            gradients, elements = dict[torch.Tensor, torch.Tensor](), 0
            for parameter in (each for each in group["params"] if each.grad is not None):
                elements += parameter.numel()
                if elements > _STEPPED and gradients:
                    self._step(group, gradients)
                    gradients, elements = {}, parameter.numel()
                gradients[parameter] = parameter.grad
            self._step(group, gradients)

    def _step(self, group: Mapping[str, Any], gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        states = [self.state[parameter] for parameter in gradients]
        wide = {key: [_out_of_8_bits(state[key], state[key].device).float() for state in states] for key in MOMENTS}
        adamw(
            [local_part(parameter) for parameter in gradients],
            [local_part(_placed_as(parameter, gradient)) for parameter, gradient in gradients.items()],
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


def check_optimizer(name: OptimizerName) -> None:
    """Raise `ConfigError` if an optimizer needs a library that is not installed."""
    if name == "adamw_8bit" and find_spec("torchao") is None:
        raise ConfigError(
            "trainer.optimizer is adamw_8bit, which needs torchao.",
            part="trainer",
            hint="Run pip install 'weightlane[optimizers]', or choose adamw_bf16.",
        )


def _held(moment: torch.Tensor, name: OptimizerName, *, signed: bool) -> torch.Tensor:
    """Return `moment`, float32 zeros, as the optimizer `name` holds it between steps."""
    if name == "adamw_bf16":
        return moment.to(torch.bfloat16)
    if name != "adamw_8bit" or moment.numel() % _BLOCK or not moment.numel() or not moment.is_contiguous():
        return moment
    from torchao.optim.subclass_8bit import OptimState8bit  # noqa: PLC0415 - optional

    held: torch.Tensor = OptimState8bit.zeros(moment.shape, signed, _BLOCK, moment.device, moment.dtype)
    return held


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


def _out_of_8_bits(moment: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a moment that is in 8 bits in float32 on `device`; any other as it is."""
    if not _is_in_8_bits(moment):
        return moment
    wide = torch.empty(moment.shape, device=device)
    _copy(moment, wide)
    return wide


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a ``DTensor``, or a plain tensor itself, without its gradient."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
