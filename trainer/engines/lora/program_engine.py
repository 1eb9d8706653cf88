"""`ProgramEngine`, the base of training engines whose ranks a program can drive itself, such as through `TrainerRank`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError

from ...data.sequences import MicroBatch
from ..contract import STATE_PARTS, Fence
from ..head import PassQuery
from ..optimizers.settings import AdamParams
from .adapter import Adapter
from .engine import AdaptedEngine

OWN = ""
"""Name of the model's own weights, where adapters are named."""


@dataclass(frozen=True, slots=True)
class ProgramPass:
    """The tokens of a forward pass, in one run for each adapter, laid out for the model."""

    runs: Sequence[tuple[Adapter | None, int]]
    """The adapter of each run, None for the model's own weights, and the number of its tokens that the model computes."""
    laid_out: Any
    """The form in which the engine computes them."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the model computes: fewer than there are if the engine shares prefixes."""
        return sum(count for _, count in self.runs)

    @property
    def adapters(self) -> list[Adapter]:
        """The adapters of the runs."""
        return [adapter for adapter, _ in self.runs if adapter is not None]


class ProgramEngine(AdaptedEngine):
    """An `AdaptedEngine` with further calls for programs: single passes, their backward passes, and steps of several slots.

    A slot is an adapter, or with the name `OWN` the model's own weights, which are trained unless the configuration freezes them.
    """

    replays_routing = True

    @property
    @abstractmethod
    def joins_slots(self) -> bool:
        """Whether a pass may have tokens of several slots."""

    @property
    def exchanges_tokens(self) -> bool:
        """Whether ranks compute tokens of each other, with their own adapters: they run passes of the same slot together."""
        return False

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that share the tokens of a pass, where `ProgramPass.tokens` are a rank's own."""
        return 1

    @property
    def layer_widths(self) -> list[int]:
        """Sum of inputs and outputs of every matrix on this rank that has fewer rows than the vocabulary."""
        shapes = [each.shape for module in self._modules for each in module.parameters(recurse=False)]
        return [sum(shape) for shape in shapes if len(shape) > 1 and shape[0] < self._vocabulary]

    @property
    def bytes_per_activation(self) -> int:
        """Bytes of one number in a forward pass."""
        return self._compute_dtype.itemsize

    def lay_out(self, parts: Sequence[tuple[str, MicroBatch]]) -> ProgramPass:
        """Prepare a pass over the tokens of some slots; of a single one unless `joins_slots`.

        `parts` are this rank's micro-batches, of any size and on any device, each with its slot. torch's grad mode must be that
        of the pass.
        """
        if self.config.router_replay:
            raise ConfigError(
                "trainer.router_replay is true, and passes of a program come without experts.",
                part="trainer",
                hint="Set it to false; forward and forward_backward of an engine take experts.",
            )
        adapters = self._open_adapters()
        chosen = [adapters.chosen(slot) for slot, _ in parts]
        laid_out, counts = self._lay_out([micro.to(self._device) for _, micro in parts])
        return ProgramPass(list(zip(chosen, counts, strict=True)), laid_out)

    def run_pass(self, tokens: ProgramPass, query: PassQuery) -> dict[str, torch.Tensor]:
        """Run the model once on this rank's own tokens, with gradient where torch's grad mode is on.

        All ranks call it together, with any slots unless the engine `exchanges_tokens`; those that hold parts of one model, with
        the same tokens. With gradient, it is a pass of trained adapters on all ranks or one of the model's own weights on all:
        only the latter exchanges gradients.

        Returns:
            Outputs by their names in `ModelOutputs`, for the rows in `query` of the parts one after the other, and float32
            ``logits``.
        """
        self._require_here("parameters")
        with self._computing("the activations of the other ranks"), self._open_adapters().active_runs(tokens.runs):
            return self._run_pass(tokens, query.to(self._device))

    def run_backward(
        self, tokens: ProgramPass, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Backpropagate gradients by `outputs` of `run_pass` to the adapters of the pass, or to the model's own weights.

        All ranks call it together, for passes of the same kind in the same order; for the same passes if the engine
        `exchanges_tokens`.
        """
        # Activation checkpointing may recompute layers, which needs the same adapters.
        with self._computing("the gradients of the other ranks"), self._open_adapters().active_runs(tokens.runs):
            self._run_backward(tokens, outputs, gradients)

    def step_slots(
        self, slots: Sequence[str], params: AdamParams, scale: float, before_change: Fence
    ) -> dict[str, float]:
        """Step slots with their gradients summed over the ranks and multiplied by `scale`. Collective.

        `before_change` is called for the model's own weights, see `TrainingEngine.optim_step`; steps of other slots change
        nothing that is published. If the gradient norm of a slot is not finite, none is stepped, the gradients of all of them are
        dropped, and `GradientError` names it.

        Returns:
            The L2 norm of each slot's gradient, after `scale` and before clipping.
        """
        chosen = {slot: self._trained(slot) for slot in slots}
        self._require_here(*STATE_PARTS)
        adapters = [adapter for adapter in chosen.values() if adapter is not None]
        try:
            norms = self._completed(adapters, scale)
            if OWN in chosen:
                self._scale_gradients(scale)
                norms[OWN] = self._step_weights(before_change, params)
                self._step += 1
                self._clear_gradients()
            self._change(adapters, norms, lambda _: None, params)
        except BaseException:
            if OWN in chosen:
                self._clear_gradients()
            for adapter in adapters:
                adapter.clear_gradients()
            raise
        return {slot: norms[slot] for slot in slots}

    @property
    @abstractmethod
    def _modules(self) -> Iterable[torch.nn.Module]:
        """The modules of the model on this rank."""

    @abstractmethod
    def _lay_out(self, parts: Sequence[MicroBatch]) -> tuple[Any, Sequence[int]]:
        """Return the form in which the model computes `parts`, and how many tokens it computes of each."""

    @abstractmethod
    def _run_pass(self, tokens: ProgramPass, query: PassQuery) -> dict[str, torch.Tensor]:
        """See `run_pass`."""

    @abstractmethod
    def _run_backward(
        self, tokens: ProgramPass, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """See `run_backward`."""

    @abstractmethod
    def _scale_gradients(self, scale: float) -> None:
        """Multiply the gradients of the model's own weights by `scale`."""
