"""Route the tokens of a mixture of experts of transformers to given experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weightlane.ckpt_engines import ConfigError

from ..hf.layout import Layout

_PART = "router replay"


def expert_blocks(model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> list[tuple[int, torch.nn.Module, int]]:
    """Return the parts of the decoder `layers` of `model` that have experts and their router.

    Each comes after the number of its layer, and before that of its experts. Raises `ConfigError` if there is none.
    """
    found = []
    for number, layer in enumerate(layers):
        for block in layer.modules():
            experts = getattr(getattr(block, "experts", None), "num_experts", None)
            if isinstance(experts, int):
                found.append((number, block, experts))
    if not found:
        raise ConfigError(
            f"algorithm.router_replay is true, and {type(model).__name__} has no layer with experts that are known here.",
            part=_PART,
            hint="Set algorithm.router_replay to false.",
        )
    return found


class RouterReplay:
    """Makes the layers of a model route tokens to given experts, within `active`.

    The router computes its scores as always, but its last ``topk``, which chooses from the scores of all experts, returns the
    given experts, and their scores. So the weights of experts, normalised or not, are the trainer's own, and have gradients.

    Args:
        model: A model of transformers, before it is sharded. It is changed in place.
        layers: Its decoder layers, in order.

    Raises:
        ConfigError: No layer has experts.
    """

    def __init__(self, model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        self._given: torch.Tensor | None = None
        self._layers = len(layers)
        blocks = expert_blocks(model, layers)
        self._experts = max(experts for *_, experts in blocks)
        for number, block, experts in blocks:
            block.forward = partial(self._routed, block.forward, number, experts)

    @contextmanager
    def active(self, layout: Layout) -> Iterator[None]:
        """Route the tokens of `layout` as its micro-batch says, in its forward and backward pass.

        Raises `ProtocolError` if the micro-batch has no `ROUTED_EXPERTS`, or those of another model.
        """
        count = layout.inputs["input_ids"].numel()
        of_model = {"layers": self._layers, "experts": self._experts}
        self._given = layout.micro.placed_experts(layout.places, count, **of_model)
        try:
            yield
        finally:
            self._given = None

    def _routed(self, run: Callable[..., Any], layer: int, experts: int, *arguments: Any, **named: Any) -> Any:
        """Replace the forward method `run` of the part of a layer that has router and experts, of which there are `experts`."""
        if self._given is None:
            return run(*arguments, **named)
        with _GivenChoice(self._given[:, layer], experts) as choice:
            output = run(*arguments, **named)
        if choice.made != 1:
            raise ConfigError(
                f"the router of layer {layer} chooses {self._given.shape[-1]} of all experts by {choice.made} calls of topk,"
                " and it has to be one.",
                part=_PART,
                hint="Set algorithm.router_replay to false for this architecture.",
            )
        return output


class _GivenChoice(TorchFunctionMode):
    """Replaces the choice of experts; `given` is int64 [tokens, experts per token], `NO_EXPERT` where the router chooses."""

    def __init__(self, given: torch.Tensor, experts: int) -> None:
        super().__init__()
        self._given, self._known, self._shape = given, given >= 0, (len(given), experts)
        self.made = 0
        """Number of choices."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        name = getattr(func, "__name__", "")
        if name not in ("topk", "masked_fill") or not args or tuple(args[0].shape) != self._shape:
            return result
        scores = args[0]
        if name == "masked_fill":  # hides the experts of other groups than the router's from its topk
            return torch.where(self._known[:, :1], scores, result)
        if result.indices.shape != self._given.shape:
            return result
        self.made += 1
        indices = torch.where(self._known, self._given, result.indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))
