"""Sums over tensor parallel ranks, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def copied(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `tensor`, which is equal on every rank of `group`; its gradient is the sum over the ranks."""
    copy: torch.Tensor = _Copied.apply(tensor, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return copy


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of `tensor` over `group`; each rank's gradient is that of the sum."""
    total: torch.Tensor = _Summed.apply(tensor, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return total


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        del ctx
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return grads[0], None
