"""All tensors that a model may compute from, with checksums and memory placements for comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from weightlane.ckpt_engines.runtime.tensor_bytes import mixed_sum
from weightlane.sync.version.tensor_spec import raw_bytes

_NO_WEIGHTS = ("kv_cache", "handler_tensor", "_moe_state")
"""Endings of attributes that hold no weights: the cache, which is replaced when a model serves, an address of a library's own
object, and the experts that the tokens of one call have chosen. Weights in such objects show in the outputs of their layer."""
_MODULE = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has."""
_DEPTH = 8
"""Most nested objects in which tensors are searched for, so that long chains of objects end."""


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors that `model` may compute from, by path: parameters, buffers, and tensors in its layers' other attributes."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        attributes = {name: value for name, value in vars(module).items() if name not in _MODULE}
        for name, value in (*module._parameters.items(), *module._buffers.items(), *attributes.items()):
            found.update(_reachable(f"{prefix}.{name}".lstrip("."), value, seen, _DEPTH))
    return found


def tensor_checksums(model: torch.nn.Module) -> dict[str, str]:
    """For each of `tensors_of`, its shape, strides, dtype, and a checksum of every bit."""
    return {name: _checksum(tensor) for name, tensor in tensors_of(model).items()}


def tensor_placements(model: torch.nn.Module) -> dict[str, str]:
    """For each of `tensors_of`, its shape, strides, offset, dtype, and the first tensor that shares its storage."""
    owners: dict[int, str] = {}
    found = {}
    for name, tensor in tensors_of(model).items():
        owner = owners.setdefault(tensor.untyped_storage()._cdata, name) if tensor.numel() else name
        found[name] = f"{tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()} {tensor.dtype} in {owner}"
    return found


def _checksum(tensor: torch.Tensor) -> str:
    spec = f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device.type}"
    if tensor.is_meta or not tensor.numel():
        return spec
    return f"{spec} {mixed_sum(raw_bytes(tensor.detach().contiguous()).clone())}"


def _reachable(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if path.endswith(_NO_WEIGHTS):
        return
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, list | tuple | set):
        inside = enumerate(value)
    elif _belongs_to_layer(value):
        inside = vars(value).items()
    if not inside or id(value) in seen or not depth:
        return
    seen.add(id(value))
    for name, item in list(inside):
        yield from _reachable(f"{path}.{name}", item, seen, depth - 1)


def _belongs_to_layer(value: Any) -> bool:
    """Whether `value` is one of vLLM's objects inside a layer: an attention implementation, a kernel, a method."""
    module = type(value).__module__
    return (
        hasattr(value, "__dict__")
        and module.startswith("vllm.")
        and not module.startswith("vllm.config")
        and not isinstance(value, torch.nn.Module | type)
    )
