"""Rotary embeddings of latent attention on vLLM's CPU platform, computed for every head.

vLLM 0.32's kernel takes the last dimension of a query for all its heads. Latent attention (DeepSeek-V2, V3) passes views of shape
[tokens, heads, rotary dim], of which only the first head was rotated, in the wrong place. The model then generates other tokens
than any other implementation. Engines without weightlane are left as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .linear import uses_weightlane

_BY_HEAD = 3


def rotate_every_head() -> None:
    """Let vLLM's own torch code rotate queries that have a dimension for heads, in models that take versions."""
    from ..vllm_surface import RotaryEmbedding  # noqa: PLC0415 - only in processes that already run vLLM

    make, kernel = RotaryEmbedding.__init__, RotaryEmbedding.forward_cpu

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.rotates_every_head = uses_weightlane()

    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rotate = type(self).forward_native if query.ndim >= _BY_HEAD and self.rotates_every_head else kernel
        rotated: tuple[torch.Tensor, torch.Tensor | None] = rotate(self, positions, query, key)
        return rotated

    RotaryEmbedding.__init__, RotaryEmbedding.forward_cpu = init, forward_cpu
