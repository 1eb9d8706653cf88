"""The layout of every rank of a replica, traced in one process that has none of them: see `rank_models`."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..expectation import expectation_of
from ..weight_loading import refuse_unsupported
from .acceptance import Verdict, judge
from .layout_map import LayoutMap, SourceSpec
from .rank_models import engine_config, model_of_rank, quiet_vllm
from .trace import trace_loading


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Of one rank."""

    layout: LayoutMap
    """As it was traced."""
    verdict: Verdict
    """What goes by copies, as a worker decides before its first version."""
    experts: list[dict[str, Any]]
    """See `held_experts`."""
    learned_s: float
    """Seconds that tracing took."""


def checked_config(
    model: str,
    *,
    tensor_parallel: int,
    dtype: str,
    expert_parallel: bool,
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """`engine_config` in a process that is quiet, after a look at the checkpoint's headers. Raises `ConfigError`."""
    # The headers come first, and tell most of what can be wrong.
    expectation_of(model, dtype=torch.float32, tied_embeddings=False)
    quiet_vllm()
    return engine_config(
        model, tensor_parallel=tensor_parallel, dtype=dtype, expert_parallel=expert_parallel, extra=extra
    )


def rank_layouts(config: Any, sources: Mapping[str, SourceSpec], *, tied: Collection[str]) -> list[RankLayout]:
    """Trace and judge the loading of `sources` on every rank of `config`, in rank order.

    Args:
        config: What `checked_config` gave; this process must not have built a vLLM model before.
        sources: The tensors of a version.
        tied: As for `judge`.

    Raises:
        ConfigError: A model cannot be built, or its weights cannot be replaced.
        Exception: What the model's own loading raised.
    """
    ranks = range(config.parallel_config.tensor_parallel_size)
    traced: list[tuple[LayoutMap, list[dict[str, Any]], float]] = []
    for rank in ranks:
        with model_of_rank(config, rank) as built:
            refuse_unsupported(built, config, config.device_config.device)
            began = time.perf_counter()
            layout = trace_loading(built, sources)
            traced.append((layout, held_experts(built), time.perf_counter() - began))
    layouts = [layout for layout, _, _ in traced]
    found = []
    for rank, (layout, experts, learned_s) in zip(ranks, traced, strict=True):
        with model_of_rank(config, rank) as built:
            found.append(RankLayout(layout, judge(built, layout, layouts, tied=tied), experts, learned_s))
    return found


def held_experts(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Which experts a rank's model has, as ``held`` and ``of``: once for all layers that have the same, nothing for none."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts  # noqa: PLC0415 - in a process that runs vLLM

    found: list[dict[str, Any]] = []
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            count, local = layer.global_num_experts, layer.expert_map
            held = list(range(count)) if local is None else (local >= 0).nonzero().flatten().tolist()
            entry = {"held": held, "of": count}
            if entry not in found:
                found.append(entry)
    return found
