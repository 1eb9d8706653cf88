"""The experts of a layer, computed by grouped matrix products of torch."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class GroupedLinear(torch.nn.Module):
    """A linear layer of every expert on this rank, computed by one grouped matrix product.

    Its weight [experts * rows, columns] has the rows of one expert after those of the other, so that each expert's matrix is a
    rectangle of it, as fused matrices have. megatron-core's own needs the grouped_gemm package or TransformerEngine.
    """

    def __init__(self, columns: int, rows: int, *, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self._experts = config.num_moe_experts // config.expert_model_parallel_size
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(self._experts * rows, columns, dtype=config.params_dtype, device=device)
        )
        # megatron-core's mark: the ranks of expert parallelism hold other weights here.
        self.weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
        self.counts: torch.Tensor
        """int64 [experts]: tokens of each expert in the forward pass; see `GroupedExperts`."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map [tokens, columns], sorted by expert, to [tokens, rows]; returns that, and None for the bias."""
        ends = self.counts.to(tokens.device).cumsum(0, dtype=torch.int32)
        matrices = self.weight.view(self._experts, -1, tokens.shape[1]).transpose(1, 2)
        return torch.nn.functional.grouped_mm(tokens, matrices, offs=ends), None


class GroupedExperts(MLP):  # type: ignore[misc]  # megatron-core is untyped to us
    """The experts of a layer on this rank, all at once: megatron-core's feed-forward layer, made of two `GroupedLinear`."""

    def __init__(self, count: int, config: TransformerConfig, pg_collection: Any) -> None:
        of_experts = copy(config)
        of_experts.ffn_hidden_size = config.moe_ffn_hidden_size
        linears = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        super().__init__(
            of_experts, linears, True, ffn_hidden_size=config.moe_ffn_hidden_size, tp_group=pg_collection.expt_tp
        )
        del count

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Compute `tokens` [tokens, width], sorted by expert, with `counts` of each expert and the router's `probs` [tokens]."""
        self.linear_fc1.counts = self.linear_fc2.counts = counts  # the feed-forward layer passes tokens only
        output, _ = super().forward(tokens, probs)
        return output, None
