"""`ModelSnapshot`: restores a model's parameters, buffers and attributes, whatever its loading did to them."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch


class ModelSnapshot:
    """A context after which modules hold the same parameters, buffers and attributes as before.

    Values are not restored: nothing inside may write to live tensors.

    Attributes:
        replaced: Full names of the tensors that were replaced inside.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._before: list[tuple[str, list[tuple[dict[str, Any], dict[str, Any]]]]] = []
        self._data: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.replaced: list[str] = []

    def __enter__(self) -> Self:
        for prefix, module in self._model.named_modules():
            holders: list[dict[str, Any]] = [module.__dict__, module._parameters, module._buffers]
            self._before.append((prefix, [(holder, dict(holder)) for holder in holders]))
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            self._data.append((name, tensor, tensor.data))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for prefix, holders in self._before:
            for holder, before in holders:
                for name in holder.keys() | before.keys():
                    was, now = before.get(name), holder.get(name)
                    if was is not now and isinstance(now if now is not None else was, torch.Tensor):
                        self.replaced.append(f"{prefix}.{name}".lstrip("."))
                if any(holder.get(name) is not value for name, value in before.items()) or len(holder) != len(before):
                    holder.clear()
                    holder.update(before)
        for name, tensor, data in self._data:
            if tensor.data.untyped_storage()._cdata != data.untyped_storage()._cdata:
                tensor.data = data
                self.replaced.append(name)
