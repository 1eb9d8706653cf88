"""Adapters on vLLM's CPU platform, computed only for the tokens of requests that have one.

vLLM 0.32 marks the tokens of a request without an adapter by the slot -1, and its CPU code indexes the slots with that: as soon
as another request of the step has an adapter, these tokens are computed with the adapter in the last slot. Its GPU kernels skip
them. Engines without weightlane are left as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .linear import uses_weightlane


def skip_tokens_without_adapter() -> None:
    """Let vLLM leave the layer's outputs of tokens without an adapter as they are, bit for bit."""
    from ..vllm_surface import PunicaWrapperCPU  # noqa: PLC0415 - only in processes that already run vLLM

    make, original = PunicaWrapperCPU.__init__, PunicaWrapperCPU._apply_expand

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.skips_tokens_without_adapter = uses_weightlane()

    def apply_expand(
        self: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        without = self.token_lora_indices < 0
        if self.no_lora or not self.skips_tokens_without_adapter or not without.any():
            original(self, y, x, w_t_all, y_offset, y_slice_size, add_inputs)
            return
        # Not masked by zeros: an adapter of infinities would still turn them into NaN.
        columns = slice(y_offset, y_offset + y_slice_size)
        before = y[without, columns]
        original(self, y, x, w_t_all, y_offset, y_slice_size, add_inputs)
        y[without, columns] = before

    PunicaWrapperCPU.__init__, PunicaWrapperCPU._apply_expand = init, apply_expand
