"""Tensors that a model computes with and that no checkpoint tensor is loaded into: recomputed whenever a version is loaded.

There are two kinds. Attention layers derive tensors from the parameters of other layers after loading (the absorbed projections
of multi-head latent attention). And a layer's view of a parameter, made before loading, becomes stale when the parameter is
replaced by a repacked one (Mamba's convolutions on CPU).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class StaleView:
    """A tensor that was a view of a parameter until the parameter was replaced."""

    view: str
    """Full name of the tensor."""
    parameter: str
    """Full name of the parameter."""
    offset: int
    strides: tuple[int, ...]
    """Offset and strides of the view in the parameter's storage."""


def made_after_loading(model: torch.nn.Module) -> set[str]:
    """Full names of the parameters that did not exist when the model was loaded."""
    from ...vllm_surface import get_layerwise_info  # noqa: PLC0415 - in a worker only

    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and name not in get_layerwise_info(module).restore_metadata[0]
    }


def derives(layer: torch.nn.Module) -> bool:
    """Whether vLLM lets `layer` derive tensors from other layers after loading."""
    from ...vllm_surface import is_deferred_attention_layer  # noqa: PLC0415 - as above

    return bool(is_deferred_attention_layer(layer))


@torch.no_grad()
def renew_derived(model: torch.nn.Module, layers: Collection[str], model_config: Any) -> None:
    """Let `layers` derive their tensors again, in place, as vLLM does after it has loaded the other layers."""
    for name in layers:
        layer: Any = model.get_submodule(name)
        layer.process_weights_after_loading(model_config.dtype)


@contextmanager
def stale_views_renewed(model: torch.nn.Module, stale_views: Sequence[StaleView]) -> Iterator[None]:
    """Inside, a layer that is loaded also copies its values into its stale views, before it processes them."""
    methods: list[Any] = []
    try:
        for view in stale_views:
            owner, _, name = view.parameter.rpartition(".")
            layer: Any = model.get_submodule(owner)
            method = layer.quant_method
            methods.append(method)
            method.process_weights_after_loading = _process_and_renew(view, name, layer, model, method)
        yield
    finally:
        for method in methods:
            vars(method).pop("process_weights_after_loading", None)


def _process_and_renew(view: StaleView, name: str, layer: Any, model: torch.nn.Module, method: Any) -> Any:
    owner, _, attribute = view.view.rpartition(".")
    # Looked up now: vLLM removes the attribute while its layer is loaded, and restores it.
    tensor: torch.Tensor = getattr(model.get_submodule(owner), attribute)
    process = method.process_weights_after_loading

    def process_and_renew(loaded: torch.nn.Module) -> None:
        if loaded is layer:
            tensor.copy_(getattr(layer, name).as_strided(tensor.shape, view.strides, view.offset))
        process(loaded)

    return process_and_renew
