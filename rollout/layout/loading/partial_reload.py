"""Reloads some layers of a live model through vLLM's own layerwise reload, and leaves the others as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from weightlane.ckpt_engines import CommitError

from .weight_loading import as_at_start


class _SomeLayers:
    """What vLLM's reload asks of a model: its layers."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        self._layers = layers

    def modules(self) -> Iterator[torch.nn.Module]:
        """The layers to reload."""
        return iter(self._layers)


def reload_layers(
    model: torch.nn.Module,
    model_config: Any,
    tensors: Mapping[str, torch.Tensor],
    *,
    modules: Collection[str],
    sources: Collection[str],
    part: str,
) -> None:
    """Load the layers `modules`, layers inside of them not included, from the checkpoint tensors `sources`.

    Everything that `sources` are loaded into has to be in `modules`, and everything that `modules` are made of in `sources`.
    Like `weightlane.rollout.layout.loading.weight_loading.load_version` in every other respect.

    Raises:
        CommitError: The layers are partly old and partly new. The next load starts from a sound state.
    """
    from ...vllm_internals.internals import (  # noqa: PLC0415 - loads vLLM
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    layers = {name: model.get_submodule(name) for name in modules}
    wanted = {
        f"{name}.{inner}".lstrip(".")
        for name, layer in layers.items()
        for inner, tensor in layer._parameters.items()
        if tensor is not None
    }
    some = _SomeLayers(list(layers.values()))
    with torch.no_grad(), as_at_start(model_config):
        try:
            initialize_layerwise_reload(some)
            loaded = model.load_weights(  # type: ignore[operator]
                (name, tensors[name]) for name in tensors if name in sources
            )
        except Exception as cause:
            raise CommitError(f"loading stopped half-way: {type(cause).__name__}: {cause}.", part=part) from cause
        finally:
            finalize_layerwise_reload(some, model_config)
    if loaded is not None and (missing := sorted(wanted - loaded)):
        raise CommitError(
            f"loading stopped half-way: {len(missing)} parameters were not replaced, among them {', '.join(missing[:3])}.",
            part=part,
        )
