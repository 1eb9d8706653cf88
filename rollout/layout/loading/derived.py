"""Tensors that a model computes with and that no checkpoint tensor is loaded into: made anew whenever a version is loaded.

There are two kinds. Attention layers derive tensors from the parameters of other layers, once these are loaded (the absorbed
projections of multi-head latent attention). And a view that a layer made of a parameter, before anything was loaded, is left
behind where the layer's parameter is replaced by one in a form of its own (Mamba's convolutions on CPU).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """A tensor that was a view of a parameter until the parameter was replaced."""

    view: str
    """Its full name."""
    parameter: str
    """The parameter's."""
    offset: int
    strides: tuple[int, ...]
    """Where its elements were in the parameter's storage."""


def made_after_loading(model: torch.nn.Module) -> set[str]:
    """Parameters that were not there to be loaded into: full names."""
    from ...vllm_internals.internals import get_layerwise_info  # noqa: PLC0415 - in a worker only

    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and name not in get_layerwise_info(module).restore_metadata[0]
    }


def derives(layer: torch.nn.Module) -> bool:
    """Whether vLLM lets this layer process what others have loaded."""
    from ...vllm_internals.internals import is_deferred_attention_layer  # noqa: PLC0415 - as above

    return bool(is_deferred_attention_layer(layer))


@torch.no_grad()
def renew_derived(model: torch.nn.Module, layers: Collection[str], model_config: Any) -> None:
    """Let `layers` derive their tensors anew, in place, as vLLM does after it has loaded the others."""
    for name in layers:
        layer: Any = model.get_submodule(name)
        layer.process_weights_after_loading(model_config.dtype)


@contextmanager
def views_renewed(model: torch.nn.Module, left_behind: Sequence[LeftBehind]) -> Iterator[None]:
    """Inside, a layer that is loaded also writes its values into the views that it leaves behind, before it processes them."""
    methods: list[Any] = []
    try:
        for view in left_behind:
            owner, _, name = view.parameter.rpartition(".")
            layer: Any = model.get_submodule(owner)
            method = layer.quant_method
            methods.append(method)
            method.process_weights_after_loading = _writing(view, name, layer, model, method)
        yield
    finally:
        for method in methods:
            vars(method).pop("process_weights_after_loading", None)


def _writing(view: LeftBehind, name: str, layer: Any, model: torch.nn.Module, method: Any) -> Any:
    owner, _, attribute = view.view.rpartition(".")
    # Now: vLLM takes it away while its layer is loaded, and puts it back.
    tensor: torch.Tensor = getattr(model.get_submodule(owner), attribute)
    process = method.process_weights_after_loading

    def write_and_process(loaded: torch.nn.Module) -> None:
        if loaded is layer:
            values = getattr(layer, name).as_strided(tensor.shape, view.strides, view.offset)
            tensor.copy_(values)
        process(loaded)

    return write_and_process
