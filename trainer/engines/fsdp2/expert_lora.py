"""Adapters of experts that transformers keeps in stacked tensors: an A and B for each layer of each expert, as on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from ..hf.checkpoint import CheckpointRun
from ..lora.adapters import PairOf
from ..lora.joint import JointPairs, LayerPair
from ..lora.sites import LoraSite

_FORM = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
"""Attributes of transformers' experts modules of the form that `StackedExperts` computes."""


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The experts of one decoder layer.

    `module` has the matrices as ``gate_up_proj`` [experts, 2 * inner, width] and ``down_proj`` [experts, width, inner].
    """

    module: Any
    layers: Sequence[Sequence[LoraSite]]
    """The gate, up and down projection of each expert, by their names in the checkpoint."""

    @property
    def sites(self) -> Iterator[LoraSite]:
        """All `layers`."""
        return (site for expert in self.layers for site in expert)

    def install(self, pair_of: PairOf) -> None:
        """Make the module compute with the A and B that `pair_of` returns; as before where it returns None for all.

        FSDP gathers the matrices for the whole decoder layer, so they are here when its modules compute.
        """
        plain: Callable[..., torch.Tensor] = self.module.forward

        def forward(
            hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            pairs = [[pair_of(site.module) for site in expert] for expert in self.layers]
            if all(pair is None for expert in pairs for pair in expert):
                return plain(hidden_states, top_k_index, top_k_weights)
            return self._forward(hidden_states, top_k_index, top_k_weights, pairs)

        self.module.forward = forward

    def _forward(
        self,
        hidden: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        pairs: Sequence[Sequence[LayerPair | None]],
    ) -> torch.Tensor:
        """Sum, for `hidden` [tokens, width], the outputs of the `chosen` experts [tokens, choices] by their `shares`."""
        total = torch.zeros_like(hidden)
        for number, ((gate, up, down), expert) in enumerate(zip(pairs, self.layers, strict=True)):
            tokens, choices = (chosen == number).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            given, rows = hidden[tokens], expert[0].rows
            added = [_added(pair, given, tokens, rows) for pair in (gate, up)]
            both = linear(given, self.module.gate_up_proj[number]) + torch.cat(added, dim=-1)
            inner = self.module._apply_gate(both)
            output = linear(inner, self.module.down_proj[number]) + _added(down, inner, tokens, hidden.shape[-1])
            total = total.index_add(0, tokens, (output * shares[tokens, choices, None]).to(total.dtype))
        return total


def stacked_experts(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module], runs: Sequence[CheckpointRun]
) -> list[StackedExperts]:
    """Return the experts inside the decoder layers `layers` of `model` that can have adapters.

    They are those of transformers' usual form whose layers the checkpoint, whose tensors are `runs`, has one by one.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    at = {(run.source, run.offset): run for run in runs}
    found = []
    for name, module in model.named_modules():
        if id(module) not in inside or any(getattr(module, key, None) is not value for key, value in _FORM.items()):
            continue
        experts, width, inner = module.get_parameter("down_proj").shape
        one = width * inner
        places = [
            (
                (f"{name}.gate_up_proj", 2 * one * e),
                (f"{name}.gate_up_proj", (2 * e + 1) * one),
                (f"{name}.down_proj", one * e),
            )
            for e in range(experts)
        ]
        shapes = ((inner, width), (inner, width), (width, inner))
        if all(
            place in at and at[place].shape == shape
            for expert in places
            for place, shape in zip(expert, shapes, strict=True)
        ):
            found.append(StackedExperts(module, [[_site(at[place]) for place in expert] for expert in places]))
    return found


def _site(run: CheckpointRun) -> LoraSite:
    rows, columns = run.shape
    return LoraSite(run.name.removesuffix(".weight"), rows, columns, (0, rows), (0, columns))


def _added(pair: LayerPair | None, inputs: torch.Tensor, tokens: torch.Tensor, rows: int) -> torch.Tensor:
    """Compute the output of `pair` for `inputs`, which are of those `tokens`, ascending, of a pass: [tokens, rows]."""
    if isinstance(pair, JointPairs):
        ends = torch.tensor([count for _, count in pair.runs], device=tokens.device).cumsum(0)
        counts = torch.bincount(torch.bucketize(tokens, ends, right=True), minlength=len(ends)).tolist()
        runs = [(each, count) for (each, _), count in zip(pair.runs, counts, strict=True) if count]
        pair = JointPairs(runs) if any(each is not None for each, _ in runs) else None
    return inputs.new_zeros(len(inputs), rows) if pair is None else pair.added(inputs)
