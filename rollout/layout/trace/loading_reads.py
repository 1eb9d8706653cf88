"""Finds out which parts of each checkpoint tensor vLLM's own loading reads, for layers that repack weights after loading.

Quantised layers are an example: a loaded weight is packed for its kernel, and copies cannot fill it. vLLM's reload temporarily
restores the parameters that loading fills. Here these parameters are restored without data, and loading is traced into them. The
trace shows what a rank needs for a reload.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from weightlane.ckpt_engines import CommitError
from weightlane.sync.version.box import Box
from weightlane.sync.version.tensor_spec import raw_bytes

from ..map.coverage import target_coverage
from ..map.layout_map import SourceSpec
from ..map.needs import needed_boxes
from .trace import restored_afterwards, trace_loading


def read_by_loading(model: torch.nn.Module, sources: Mapping[str, SourceSpec]) -> dict[str, list[Box]]:
    """The disjoint boxes of `sources` that loading reads on this rank. The model is unchanged when this returns.

    Tensors that cannot be traced count as read completely. Runs inside vLLM's current config, as a load does.

    Raises:
        CommitError: Some parameter was not filled.
        Exception: The error of the model's loading, when leaving tensors out does not help.
    """
    with _parameters_before_processing(model):
        layout = trace_loading(model, sources)
    # Parameters that a layer drops once it is loaded, such as scales of an unquantised cache, need not be in a checkpoint.
    loaded = {name for name, _ in model.named_parameters()} - {refusal.tensor for refusal in layout.refused_targets}
    for target, counts in target_coverage(layout).items():
        if counts.unmapped and target in loaded:
            raise CommitError(f"{counts.unmapped} elements of {target} are not loaded", part="layout")
    return needed_boxes(layout)


def unread_by_loading(model: torch.nn.Module, sources: Mapping[str, SourceSpec]) -> set[str]:
    """Names of the `sources` of which loading reads no element on this rank; none if that cannot be traced.

    The model is unchanged when this returns. Runs inside vLLM's current config, as a load does.
    """
    try:
        with _parameters_before_processing(model):
            boxes = needed_boxes(trace_loading(model, sources))
    except Exception:  # noqa: BLE001 - a model's loader may raise anything; every tensor then counts as read
        return set()
    return {name for name, spec in sources.items() if spec.numel and not boxes[name]}


class OnlyRead(Mapping[str, torch.Tensor]):
    """Tensors that have their values only in the boxes that are read; every other bit is set, which is NaN in float types.

    A tensor without an entry in `boxes`, see `read_by_loading`, has all its values.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, list[Box]]) -> None:
        self._tensors, self._boxes = tensors, boxes

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        if name not in self._boxes:
            return tensor
        partial = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        raw_bytes(partial).fill_(0xFF)
        for box in self._boxes[name]:
            partial[box.index].copy_(tensor[box.index])
        return partial

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@contextmanager
def _parameters_before_processing(model: torch.nn.Module) -> Iterator[None]:
    """Inside, every layer has the parameters that its loading fills, on the meta device."""
    from ...vllm_surface import get_layerwise_info, restore_layer_on_meta  # noqa: PLC0415 - in a worker only

    # Torch changes these sets in place when buffers are replaced.
    unsaved = [(layer, set(layer._non_persistent_buffers_set)) for layer in model.modules()]
    try:
        with restored_afterwards(model):
            for layer, _ in unsaved:
                restore_layer_on_meta(layer, get_layerwise_info(layer))
                for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                    if tensor is not None and hasattr(tensor, "weight_loader"):
                        tensor.weight_loader = inspect.unwrap(tensor.weight_loader, stop=_is_original)
            yield
    finally:
        for layer, names in unsaved:
            layer._non_persistent_buffers_set.clear()
            layer._non_persistent_buffers_set.update(names)


def _is_original(loader: Callable[..., Any]) -> bool:
    """Whether `loader` is not a wrapper of vLLM's reload, which delays loading."""
    return getattr(loader, "__name__", "") != "online_process_loader"
