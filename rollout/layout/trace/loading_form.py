"""What vLLM's own loading reads of each checkpoint tensor, for layers that keep weights in a form that loading does not fill.

Quantised layers are an example: once loaded, a weight is packed for its kernel, and copies cannot go there. vLLM's reload gives
such a layer back, for a while, the parameters that loading fills. They are given to the model here without their data, and
loading is traced into them: that tells what a rank needs for a reload.
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
from .trace import trace_loading
from .untouched import Untouched


def read_by_loading(model: torch.nn.Module, sources: Mapping[str, SourceSpec]) -> dict[str, list[Box]]:
    """The parts of `sources` that loading them reads on this rank, in disjoint boxes; the model is as before when this returns.

    Tensors of which that cannot be told are read whole. Runs inside vLLM's current config, as a load does.

    Raises:
        CommitError: Loading does not fill every parameter with what was seen.
        Exception: What loading raised, when leaving tensors out does not help.
    """
    with _loading_form(model):
        layout = trace_loading(model, sources)
    # What is gone once a layer is loaded, such as the scales of a cache that is not quantised, need not be in a checkpoint.
    kept = {name for name, _ in model.named_parameters()} - {refusal.tensor for refusal in layout.refused_targets}
    for target, counts in target_coverage(layout).items():
        if counts.unmapped and target in kept:
            raise CommitError(f"{counts.unmapped} elements of {target} are not loaded", part="layout")
    return needed_boxes(layout)


class OnlyRead(Mapping[str, torch.Tensor]):
    """Tensors of which only what is read has its values; every other bit is set, which is NaN in types that have it.

    Args:
        tensors: Their values; each may be made when it is asked for.
        boxes: What is read of each, see `read_by_loading`; all of those that are not named.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, list[Box]]) -> None:
        self._tensors, self._boxes = tensors, boxes

    def __getitem__(self, name: str) -> torch.Tensor:
        whole = self._tensors[name]
        if name not in self._boxes:
            return whole
        held = torch.empty_like(whole, memory_format=torch.contiguous_format)
        raw_bytes(held).fill_(0xFF)
        for box in self._boxes[name]:
            held[box.index].copy_(whole[box.index])
        return held

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@contextmanager
def _loading_form(model: torch.nn.Module) -> Iterator[None]:
    """Inside, every layer has the parameters that its loading fills, on the meta device."""
    from ...vllm_internals.internals import get_layerwise_info, restore_layer_on_meta  # noqa: PLC0415 - in a worker only

    # Torch notes there, in place, which buffers are not saved, as buffers come and go.
    unsaved = [(layer, set(layer._non_persistent_buffers_set)) for layer in model.modules()]
    try:
        with Untouched(model):
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
    """Whether it is not one that a reload has put before another, to put off what that does."""
    return getattr(loader, "__name__", "") != "online_process_loader"
