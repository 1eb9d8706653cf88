"""`LiveGraph`: the graph of one forward pass from its outputs back to an adapter, until its backward pass has run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weightlane.ckpt_engines import ProtocolError

from .inputs import PART

RunBackward = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""Runs the backward pass from outputs and the gradients of the loss with respect to them."""


class LiveGraph:
    """A forward pass whose backward pass has not run.

    The outputs that a program gets are detached from the graph. torch's own backward pass ends at them and calls this object,
    which runs the rest of it with the slot of the forward pass, whatever is pushed by then. It lives while any of these outputs
    does. `slot` accumulates the gradients of the backward pass, which `run` runs; `nbytes` is the graph's estimated memory.
    """

    def __init__(self, slot: str, outputs: Sequence[torch.Tensor], nbytes: int, run: RunBackward) -> None:
        self.slot, self.nbytes = slot, nbytes
        self._outputs: Sequence[torch.Tensor] | None = outputs
        self._run = run

    @property
    def waits(self) -> bool:
        """Whether its backward pass has not run."""
        return self._outputs is not None

    def handed_out(self) -> list[torch.Tensor]:
        """The outputs, for the program."""
        assert self._outputs is not None
        start = torch.zeros((), requires_grad=True)
        return list(_Cut.apply(start, self, *(each.detach() for each in self._outputs)))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def backward(self, gradients: Sequence[torch.Tensor] | None = None) -> None:
        """Run the backward pass, once. Without `gradients` they are zeros, because the other ranks wait for this pass."""
        outputs, self._outputs = self._outputs, None
        if outputs is None:
            raise ProtocolError(
                f"the backward pass of a forward pass of {self.slot!r} was run twice.",
                part=PART,
                hint="Add up losses that share a forward pass, and call backward once.",
            )
        self._run(outputs, gradients or [torch.zeros_like(each) for each in outputs])


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, graph: LiveGraph, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        del start
        ctx.graph = graph
        return tuple(each.view_as(each) for each in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        with torch.enable_grad():  # which activation checkpointing needs
            ctx.graph.backward(gradients)
        return (None, None, *(None for _ in gradients))
