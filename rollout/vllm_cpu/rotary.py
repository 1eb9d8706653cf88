"""Rotary embeddings of latent attention on vLLM's CPU platform, computed for every head.

vLLM 0.32's kernel takes the last dimension of a query for all its heads. Latent attention (DeepSeek-V2, V3) passes views of shape
[tokens, heads, rotary dim], of which only the first head was rotated, in the wrong place. The model then generates other tokens
than any other implementation. Every vLLM with weightlane installed is corrected, so that a model decodes the same in all of them.
"""

from __future__ import annotations

from typing import Any

import torch

_BY_HEAD = 3


def rotate_every_head() -> None:
    """Let vLLM's own torch code rotate queries that have a dimension for heads."""
    from ..vllm_surface import RotaryEmbedding  # noqa: PLC0415 - only in processes that already run vLLM

    kernel = RotaryEmbedding.forward_cpu

    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rotate = kernel if query.ndim < _BY_HEAD else type(self).forward_native
        rotated: tuple[torch.Tensor, torch.Tensor | None] = rotate(self, positions, query, key)
        return rotated

    RotaryEmbedding.forward_cpu = forward_cpu
