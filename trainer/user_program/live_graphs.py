"""`LiveGraph`: the graph of one forward pass from its outputs back to its slots, until its backward pass has run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from weightlane.ckpt_engines import ProtocolError

from .inputs import PART

RunBackward = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Collection[str]], None]
"""Runs the backward pass from outputs and the gradients by them; the names are those of slots on which the loss depends."""


class LiveGraph:
    """A forward pass whose backward pass has not run.

    The outputs that a program gets are detached from the graph. torch's own backward pass ends at them and calls this object,
    which runs the rest of it with the slots of the forward pass, whatever is pushed by then. It lives while any of these outputs
    does.

    Args:
        key: What passes have in common that ranks run backward together: the number of the forward pass, equal on all ranks,
            if they need all ranks at the same pass, else the kind.
        slots: The slots of the pass.
        outputs: The outputs for the program, each with its slot.
        spare: Further tensors of the graph, with a gradient of zeros: they make the graph the same on every rank.
        nbytes: The graph's estimated memory.
        run: Runs the backward pass.
        together: Whether a backward pass needs all ranks at the same pass, so that only `PassRunner.backward` can run it.
    """

    def __init__(
        self,
        key: int,
        slots: Collection[str],
        outputs: Sequence[tuple[str, torch.Tensor]],
        spare: Sequence[torch.Tensor],
        nbytes: int,
        run: RunBackward,
        *,
        together: bool,
    ) -> None:
        self.key, self.slots, self.nbytes = key, slots, nbytes
        self.held = False
        """Whether torch's backward pass only leaves its gradients here, for a later call of `backward`."""
        self._slots = [slot for slot, _ in outputs]
        self._outputs: Sequence[torch.Tensor] | None = [*(tensor for _, tensor in outputs), *spare]
        self._gradients: Sequence[torch.Tensor | None] | None = None
        self._run, self._together = run, together

    @property
    def waits(self) -> bool:
        """Whether its backward pass has not run."""
        return self._outputs is not None

    def handed_out(self) -> list[torch.Tensor]:
        """The outputs, for the program."""
        assert self._outputs is not None
        start = torch.zeros((), requires_grad=True)
        outputs = [each.detach() for each in self._outputs[: len(self._slots)]]
        return list(_Cut.apply(start, self, *outputs)) if outputs else []  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of the loss from torch's backward pass, None for outputs that it does not depend on."""
        if self._outputs is None or self._gradients is not None:
            raise ProtocolError(
                f"the backward pass of a forward pass of {' and '.join(map(repr, self.slots))} was run twice.",
                part=PART,
                hint="Add up losses that share a forward pass, and call backward once.",
            )
        if self._together and not self.held:
            raise ProtocolError(
                "loss.backward() may run passes in another order than other ranks, which have experts of the same layers.",
                part=PART,
                hint="With trainer.megatron.expert_parallel above 1, call TrainerRank.backward(loss) on every rank.",
            )
        self._gradients = gradients
        if not self.held:
            self.backward()

    def backward(self) -> None:
        """Run the backward pass, once. Gradients that were not taken are zeros, because the other ranks wait for this pass."""
        outputs, self._outputs = self._outputs, None
        assert outputs is not None, "the caller looks whether it waits"
        taken = self._gradients or [None] * len(self._slots)
        self._gradients = None
        reached = {slot for slot, gradient in zip(self._slots, taken, strict=True) if gradient is not None}
        taken = [*taken, *[None] * (len(outputs) - len(taken))]
        gradients = [
            torch.zeros_like(output) if gradient is None else gradient
            for output, gradient in zip(outputs, taken, strict=True)
        ]
        with torch.enable_grad():  # which activation checkpointing needs
            self._run(outputs, gradients, reached)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, graph: LiveGraph, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        del start
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.graph.take(gradients)
        return (None, None, *(None for _ in gradients))
