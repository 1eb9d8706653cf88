"""Reloads a live vLLM model, or some of its layers, through vLLM's own layerwise reload.

vLLM's loaders map, fuse, slice and convert tensors. The reload runs whatever a layer needs after loading and copies the result
into the existing storage, so that captured graphs and views stay valid. Every function runs inside vLLM's current config,
between two decode steps.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from weightlane.ckpt_engines import CommitError

from .derived import made_after_loading


class _SomeLayers:
    """The interface of a model that vLLM's reload uses: its layers."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        self._layers = layers

    def modules(self) -> Iterator[torch.nn.Module]:
        """The layers to reload."""
        return iter(self._layers)


def load_version(
    model: torch.nn.Module, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]], *, part: str
) -> None:
    """Replace every weight of `model` by `tensors` (pairs of Hugging Face name and tensor of full shape), in place.

    vLLM takes one tensor after the other and keeps it until its layer is complete. Nothing refers to a tensor afterwards.

    Raises:
        CommitError: The model is now partly old and partly new: it must not serve until a version was loaded completely. The
            next load starts from a sound state.
    """
    # Taken before the reload, which separates tied parameters while it runs.
    names = {name for name, _ in model.named_parameters()} - made_after_loading(model)
    _reload(model, model, model_config, tensors, names, part)


def reload_layers(
    model: torch.nn.Module,
    model_config: Any,
    tensors: Mapping[str, torch.Tensor],
    *,
    modules: Collection[str],
    sources: Collection[str],
    part: str,
) -> None:
    """Load the layers `modules`, without layers inside of them, from the checkpoint tensors `sources`.

    `modules` must contain every layer that `sources` are loaded into, and `sources` every tensor that `modules` are made of.

    Raises:
        CommitError: The layers are partly old and partly new. The next load starts from a sound state.
    """
    layers = {name: model.get_submodule(name) for name in modules}
    names = {
        f"{name}.{inner}".lstrip(".")
        for name, layer in layers.items()
        for inner, tensor in layer._parameters.items()
        if tensor is not None
    }
    some = _SomeLayers(list(layers.values()))
    _reload(model, some, model_config, ((name, tensors[name]) for name in tensors if name in sources), names, part)


def _reload(
    model: Any, layers: Any, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]], names: set[str], part: str
) -> None:
    """Reload `layers` of `model`, whose parameters have the full names `names`."""
    from ...vllm_internals.internals import (  # noqa: PLC0415 - loads vLLM
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    with torch.no_grad(), _conditions_of_start(model_config):
        try:
            initialize_layerwise_reload(layers)
            loaded = model.load_weights(tensors)
        except Exception as cause:
            raise CommitError(f"loading stopped half-way: {type(cause).__name__}: {cause}.", part=part) from cause
        finally:
            # Also after a failure, which leaves layers without storage: the next step, or the next commit, would crash.
            finalize_layerwise_reload(layers, model_config)
    if loaded is not None and (missing := sorted(names - loaded)):
        raise CommitError(
            f"loading stopped half-way: {len(missing)} parameters were not replaced, among them {', '.join(missing[:3])}.",
            part=part,
        )


@contextmanager
def _conditions_of_start(model_config: Any) -> Iterator[None]:
    """Inside, torch's default dtype is the one of vLLM's start, since some layers use it while they are loaded.

    vLLM's warning about layers that have nothing to load, such as rotary embeddings, is kept out of the log.
    """
    from ...vllm_internals.internals import set_default_torch_dtype  # noqa: PLC0415 - only in a vLLM worker

    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with set_default_torch_dtype(model_config.dtype):
            yield
    finally:
        logger.setLevel(level)
