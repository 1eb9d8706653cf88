"""Reloads a live vLLM model, or some of its layers, through vLLM's own layerwise reload.

vLLM's loaders map, fuse, slice and convert tensors. The reload runs whatever a layer needs after loading and copies the result
into the existing storage, so that captured graphs and views stay valid. Every function runs inside vLLM's current config,
between two decode steps.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from weightlane.ckpt_engines import CommitError

from .derived import made_after_loading


def load_version(
    model: torch.nn.Module,
    model_config: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    part: str,
    layers: Collection[str] | None = None,
) -> None:
    """Load `tensors` into `model`, in place.

    vLLM takes one tensor after the other and keeps it until its layer is complete. Nothing refers to a tensor afterwards.

    `tensors` are Hugging Face names and tensors of full shapes. `layers` are loaded without layers inside of them. They must
    be all that `tensors` are loaded into, and `tensors` all that they are made of. None loads the whole model.

    Raises:
        CommitError: The layers are now partly old and partly new: the model must not serve until a version was loaded completely.
            The next load does not depend on what this one left.
    """
    from ...vllm_surface import finalize_layerwise_reload, initialize_layerwise_reload  # noqa: PLC0415 - loads vLLM

    # Taken before the reload, which separates tied parameters while it runs.
    names = {name for name, _ in model.named_parameters() if layers is None or name.rpartition(".")[0] in layers}
    names -= made_after_loading(model)
    reloaded: Any = model
    if layers is not None:
        some = [model.get_submodule(name) for name in layers]
        reloaded = SimpleNamespace(modules=lambda: some)  # all that vLLM's reload uses of a model
    with torch.no_grad(), _conditions_of_start(model_config):
        try:
            initialize_layerwise_reload(reloaded)
            loaded = model.load_weights(tensors)  # type: ignore[operator]
        except Exception as cause:
            raise CommitError(f"loading stopped half-way: {type(cause).__name__}: {cause}.", part=part) from cause
        finally:
            # Also after a failure, which leaves layers without storage: the next step, or the next commit, would crash.
            finalize_layerwise_reload(reloaded, model_config)
    if loaded is not None and (missing := sorted(names - loaded)):
        raise CommitError(
            f"loading stopped half-way: {len(missing)} parameters were not replaced, among them {', '.join(missing[:3])}.",
            part=part,
        )


@contextmanager
def _conditions_of_start(model_config: Any) -> Iterator[None]:
    """Inside, torch's default dtype is the one of vLLM's start, since some layers use it while they are loaded.

    vLLM's warning about layers that have nothing to load, such as rotary embeddings, is left out of the log.
    """
    from ...vllm_surface import set_default_torch_dtype  # noqa: PLC0415 - only in a vLLM worker

    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with set_default_torch_dtype(model_config.dtype):
            yield
    finally:
        logger.setLevel(level)
