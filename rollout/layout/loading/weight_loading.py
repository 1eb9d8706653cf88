"""Puts a complete set of checkpoint tensors into a live vLLM model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from weightlane.ckpt_engines import CommitError, ConfigError

from ...vllm_internals.cpu_experts import computes_from_parameters
from .derived import made_after_loading
from .quantised_models import refuse_other_formats

_PART = "rollout model"
_DRAFTS_WITHOUT_WEIGHTS = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Ways to guess tokens ahead that look at the text only."""


def refuse_unsupported(model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
    """Raise `ConfigError` for a model whose weights could not be replaced correctly.

    Wrong weights would otherwise go unnoticed: they have the right shapes and generate fluent garbage.
    """
    parallel, model_config = vllm_config.parallel_config, vllm_config.model_config
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        raise ConfigError(
            "pipeline and data parallel replicas are not supported.",
            part=_PART,
            hint="Use tensor_parallel and replicas.",
        )
    _refuse_modes(vllm_config)
    refuse_other_formats(model_config)
    if device.type == "cpu":
        from ...vllm_internals.internals import RoutedExperts  # noqa: PLC0415 - only in a vLLM worker

        packed = [
            name
            for name, layer in model.named_modules()
            if isinstance(layer, RoutedExperts) and not computes_from_parameters(layer)
        ]
        if packed:
            raise ConfigError(
                f"mixture-of-experts layers ({packed[0]} and {len(packed) - 1} more) are quantised, and kept by vLLM on CPU in a"
                " form that would not be made again after a commit.",
                part=_PART,
                hint="Use an unquantised checkpoint on CPU, or a GPU.",
            )


def _refuse_modes(vllm_config: Any) -> None:
    """Refuse what would let vLLM go on with old weights, or take away the memory that new ones are written to."""
    draft = getattr(vllm_config, "speculative_config", None)
    method = str(getattr(draft, "method", "") or "")
    modes = [
        (
            getattr(vllm_config, "lora_config", None) is not None,
            "LoRA adapters (enable_lora)",
            "adapters stay as they are beside weights that change under them",
        ),
        (
            bool(getattr(vllm_config.model_config, "enable_sleep_mode", False)),
            "sleep mode (enable_sleep_mode)",
            "a version that comes while vLLM sleeps would be written to memory that is not there",
        ),
        (
            draft is not None and method not in _DRAFTS_WITHOUT_WEIGHTS,
            f"a draft model (speculative_config, {method})",
            "it would keep the weights that it was started with",
        ),
    ]
    for on, mode, reason in modes:
        if on:
            raise ConfigError(
                f"a replica with {mode} takes no versions: {reason}.", part=_PART, hint="Start vLLM without it."
            )


def load_version(
    model: torch.nn.Module,
    model_config: Any,
    tensors: Mapping[str, torch.Tensor] | Iterator[tuple[str, torch.Tensor]],
    *,
    part: str,
) -> None:
    """Replace every weight of `model` by `tensors` (Hugging Face names, full shapes), in place.

    Of an iterator one tensor is asked for after the other, as loading goes on; what it gave is kept until its layer is complete.

    vLLM's own loaders map, fuse, slice and convert; its layerwise reload runs whatever a layer needs after loading and copies
    the result into the storage that is there, so that captured graphs and views stay valid. When this returns nothing refers
    to `tensors` any more. Runs inside vLLM's current config, between two steps.

    Raises:
        CommitError: The model is now partly old and partly new: it must not serve until a version was loaded completely. The
            next load starts from a sound state.
    """
    from ...vllm_internals.internals import (  # noqa: PLC0415 - loads vLLM
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    # Before the reload: it separates tied parameters for its duration.
    names = {name for name, _ in model.named_parameters()} - made_after_loading(model)
    with torch.no_grad(), as_at_start(model_config):
        try:
            initialize_layerwise_reload(model)
            loaded = model.load_weights(iter(tensors.items()) if isinstance(tensors, Mapping) else tensors)  # type: ignore[operator]
        except Exception as cause:
            raise _half_loaded(f"{type(cause).__name__}: {cause}", part) from cause
        finally:
            # Also after a failure: it leaves layers without storage, and the next step, or the next commit, would die of it.
            finalize_layerwise_reload(model, model_config)
    if loaded is not None and (missing := sorted(names - loaded)):
        raise _half_loaded(f"{len(missing)} parameters were not replaced, among them {', '.join(missing[:3])}", part)


@contextmanager
def as_at_start(model_config: Any) -> Iterator[None]:
    """Inside, torch's default type is what it is when vLLM starts, since some layers ask for it while they are loaded.

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


def _half_loaded(reason: str, part: str) -> CommitError:
    return CommitError(f"loading stopped half-way: {reason}.", part=part)
