"""Route tokens to given experts, by the argument that megatron-core passes to its routers for this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from weightlane.ckpt_engines import ProtocolError


def replay_routing(chunk: torch.nn.Module) -> None:
    """Make the routers of `chunk`, a part of a model, choose the experts in `PackedRow.experts`."""
    for layer in chunk.modules():
        router = getattr(getattr(layer, "mlp", None), "router", None)
        if isinstance(layer, TransformerLayer) and isinstance(router, TopKRouter):
            router.router_replay = _LayerReplay(layer)


class _LayerReplay:
    """The choice of experts in one layer, in place of megatron-core's ``RouterReplay``.

    That one queues the experts of micro-batches, and has to be told which pass comes next. Here, experts are part of the
    description of a row, which every layer is called with, also when activation checkpointing calls it again.
    """

    def __init__(self, layer: TransformerLayer) -> None:
        self._given: torch.Tensor | None = None
        self._place = layer.layer_number - 1
        layer.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, _: torch.nn.Module, __: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        self._given = arguments["packed_seq_params"].experts[:, self._place]

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., Sequence[torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of the chosen experts, and these; both [tokens, topk]. See ``RouterReplay.get_replay_topk``."""
        _, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        assert self._given is not None, "set before the layer"
        if self._given.shape != own.shape:
            raise ProtocolError(
                f"the batch routes {len(self._given)} tokens to {self._given.shape[1]} experts each, and the router"
                f" {len(own)} to {own.shape[1]}.",
                part="router replay",
                hint="Train the model that the rollouts generate with.",
            )
        chosen = torch.where(self._given >= 0, self._given, own)
        return scores.gather(1, chosen), chosen
