"""Builds a second model and loads it by vLLM's ordinary start-up code: the reference for every other method to write weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from vllm.config import LoadConfig

from ...vllm_surface import BaseModelLoader, set_current_vllm_config
from ..loading.derived import StaleView
from ..rank_model import RankModel
from .layer_outputs import PatternedMemory
from .model_tensors import tensors_of


class _Loader(BaseModelLoader):  # type: ignore[misc]  # vLLM is untyped to us
    """vLLM's ordinary loading, from given values instead of files."""

    def __init__(self, load_config: LoadConfig, values: Mapping[str, torch.Tensor]) -> None:
        super().__init__(load_config)
        self._values = values
        self.views: list[StaleView] = []

    def download_model(self, model_config: Any) -> None:
        """Do nothing: the values are given."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load the values as vLLM's own loaders load files."""
        del model_config
        self.views = _views(model)
        model.load_weights(iter(self._values.items()))  # type: ignore[operator]


def fresh_model(rank: RankModel, values: Mapping[str, torch.Tensor]) -> tuple[RankModel, list[StaleView]]:
    """Build a second model like that of `rank` and load `values` into it. All tensor-parallel ranks call this together.

    Memory that nothing is loaded into holds a pattern.

    Returns:
        The model, and the tensors that were views of its parameters until it was loaded.

    Raises:
        Exception: The error of vLLM's loading.
    """
    config = copy.copy(rank.config)
    # Layers are registered in this config by name, and the serving model's layers have the same names.
    config.compilation_config = copy.copy(rank.config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    loader = _Loader(config.load_config, values)
    with set_current_vllm_config(config), torch.random.fork_rng(), PatternedMemory():  # type: ignore[no-untyped-call]
        model = loader.load_model(vllm_config=config, model_config=config.model_config)
    tensors = tensors_of(model)
    stale = [view for view in loader.views if _is_stale(view, tensors)]
    return replace(rank, model=model, config=config), stale


def _views(model: torch.nn.Module) -> list[StaleView]:
    """Tensors that are views of parameters under another name, in a model that nothing was loaded into."""
    parameters = {tensor.untyped_storage()._cdata: name for name, tensor in model.named_parameters() if tensor.numel()}
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [
        StaleView(name, parameters[storage], int(tensor.storage_offset()), tensor.stride())
        for name, tensor in tensors_of(model).items()
        if name not in names and (storage := tensor.untyped_storage()._cdata) in parameters
    ]


def _is_stale(view: StaleView, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether view and parameter still exist and share no memory any more."""
    if view.view not in tensors or view.parameter not in tensors:
        return False
    return bool(tensors[view.view].untyped_storage()._cdata != tensors[view.parameter].untyped_storage()._cdata)
