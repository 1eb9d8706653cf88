"""Restores a model's parameters, buffers and attributes, whatever its loading did to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def restored_afterwards(model: torch.nn.Module) -> Iterator[list[str]]:
    """Afterwards, modules hold the same parameters, buffers and attributes as before.

    Values are not restored: nothing inside may write to live tensors. Yields a list, to which the full names of the tensors that
    were replaced inside are added in the end.
    """
    before: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (prefix, holder, dict(holder))
        for prefix, module in model.named_modules()
        for holder in (module.__dict__, module._parameters, module._buffers)
    ]
    data = [(name, tensor, tensor.data) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    replaced: list[str] = []
    try:
        yield replaced
    finally:
        for prefix, holder, held in before:
            for name in holder.keys() | held.keys():
                was, now = held.get(name), holder.get(name)
                if was is not now and isinstance(now if now is not None else was, torch.Tensor):
                    replaced.append(f"{prefix}.{name}".lstrip("."))
            if any(holder.get(name) is not value for name, value in held.items()) or len(holder) != len(held):
                holder.clear()
                holder.update(held)
        for name, tensor, was in data:
            if tensor.data.untyped_storage()._cdata != was.untyped_storage()._cdata:
                tensor.data = was
                replaced.append(name)
