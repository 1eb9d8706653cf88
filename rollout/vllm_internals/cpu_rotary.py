"""Rotary embeddings of latent attention on vLLM's CPU platform, computed for every head.

vLLM 0.32's kernel takes the last dimension of a query for all its heads. Latent attention (DeepSeek-V2, V3) hands it
[tokens, heads, rotary dim], views of larger tensors, and only the first head was rotated, in the wrong place: the model then
generates what no other implementation of it does. Every vLLM beside which weightlane is installed is put right, whether or not it
uses weightlane: a model must decode the same either way.
"""

from __future__ import annotations

from typing import Any

import torch

_PATCHED = "_weightlane_original"
_BY_HEAD = 3


def rotate_every_head() -> None:
    """Let vLLM's own torch code rotate queries that come by head; calling it again does nothing."""
    from .internals import RotaryEmbedding  # noqa: PLC0415 - only in processes that already run vLLM

    kernel = RotaryEmbedding.forward_cpu
    if hasattr(kernel, _PATCHED):
        return

    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rotate = kernel if query.ndim < _BY_HEAD else type(self).forward_native
        rotated: tuple[torch.Tensor, torch.Tensor | None] = rotate(self, positions, query, key)
        return rotated

    setattr(forward_cpu, _PATCHED, kernel)
    RotaryEmbedding.forward_cpu = forward_cpu
