"""The layout of every rank of a replica, traced in one process that has none of them: see `rank_models`."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightlane.sync.version.box import Box

from ...commit.rank_agreement import RankGroup
from ..acceptance import Verdict, Way, judge, untraceable, whole_reload
from ..loading.expectation import expectation_of
from ..loading.quantised_models import refuse_other_formats
from ..loading.weight_loading import refuse_unsupported
from ..map.layout_map import LayoutMap, Refusal, SourceSpec
from ..map.needs import needed_boxes
from ..proof.rehearsal import Rehearsal
from ..trace.loading_form import read_by_loading
from ..trace.trace import trace_loading
from .rank_models import engine_config, model_of_rank, quiet_vllm

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Of one rank."""

    layout: LayoutMap
    """As it was traced; without targets where that cannot be."""
    verdict: Verdict
    """What goes by copies."""
    needed: dict[str, list[Box]]
    """What is read of each tensor."""
    experts: list[dict[str, Any]]
    """See `held_experts`."""
    learned_s: float
    """Seconds that tracing took."""
    nbytes: int
    """Of its parameters."""


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
    config = engine_config(
        model, tensor_parallel=tensor_parallel, dtype=dtype, expert_parallel=expert_parallel, extra=extra
    )
    refuse_other_formats(config.model_config)
    return config


def rank_layouts(config: Any, sources: Mapping[str, SourceSpec], *, tied: Collection[str]) -> list[RankLayout]:
    """Trace and judge the loading of `sources` on every rank of `config`, in rank order. All are reloaded, or none.

    Args:
        config: What `checked_config` gave; this process must not have built a vLLM model before.
        sources: The tensors of a version.
        tied: As for `judge`.

    Raises:
        ConfigError: A model cannot be built, or its weights cannot be replaced.
    """
    ranks = range(config.parallel_config.tensor_parallel_size)
    traced: list[tuple[LayoutMap, list[dict[str, Any]], float, int]] = []
    untraced: list[Refusal] = []
    for rank in ranks:
        with model_of_rank(config, rank) as built:
            refuse_unsupported(built, config, config.device_config.device)
            began = time.perf_counter()
            try:
                layout = trace_loading(built, sources)
            except Exception as cause:  # noqa: BLE001 - a model's loader may raise anything; versions are loaded without copies then
                untraced.append(untraceable(cause))
                layout = LayoutMap(
                    dict(sources), {}, refused_sources=[Refusal(name, untraced[0].why) for name in sources]
                )
            nbytes = sum(parameter.nbytes for parameter in built.parameters())
            traced.append((layout, held_experts(built), time.perf_counter() - began, nbytes))
    layouts = [layout for layout, *_ in traced]
    found = []
    for rank, (layout, experts, learned_s, nbytes) in zip(ranks, traced, strict=True):
        with model_of_rank(config, rank) as built:
            verdict = whole_reload(dict.fromkeys(untraced)) if untraced else judge(built, layout, layouts, tied=tied)
            needed = _read(built, sources) if verdict.way is Way.RELOAD else needed_boxes(layout)
            found.append(RankLayout(layout, verdict, needed, experts, learned_s, nbytes))
    why = next((rank.verdict.summary for rank in found if rank.verdict.way is Way.RELOAD), None)
    if why is None or all(rank.verdict.way is Way.RELOAD for rank in found):
        return found
    return _reloaded(config, sources, found, why)


def rehearsed(
    config: Any, sources: Mapping[str, SourceSpec], ranks: Sequence[RankLayout]
) -> tuple[list[RankLayout], str | None]:
    """How versions are written once that was rehearsed, as workers do; and what is against every way, if anything is.

    Needs memory for two models of a rank. Ranks are gone through one by one; for each the others compute what it does.
    """
    found = list(ranks)
    while True:
        reloads = found[0].verdict.way is Way.RELOAD
        trouble = _trouble(config, sources, found)
        if trouble is not None and reloads:
            whole = {name: [Box.whole(spec.shape)] for name, spec in sources.items()}
            found = [replace(rank, needed=whole) for rank in found]
            trouble = _trouble(config, sources, found)
        if trouble is None or reloads:
            return found, trouble
        found = _reloaded(config, sources, found, trouble)


def _trouble(config: Any, sources: Mapping[str, SourceSpec], ranks: Sequence[RankLayout]) -> str | None:
    """What some rank's rehearsal says against writing versions so."""
    for number, rank in enumerate(ranks):
        with model_of_rank(config, number) as built:
            rehearsal = Rehearsal(
                built,
                config,
                torch.device(config.device_config.device),
                sources,
                RankGroup(None),
                part=f"rank {number}",
                computes=True,
            )
            read = rank.needed if rank.verdict.way is Way.RELOAD else None
            if (trouble := rehearsal.trouble_with(rank.verdict, read)) is not None:
                return trouble
    return None


def _reloaded(
    config: Any, sources: Mapping[str, SourceSpec], ranks: Sequence[RankLayout], why: str
) -> list[RankLayout]:
    """`ranks` where every version goes through vLLM's own loading."""
    found = []
    for number, rank in enumerate(ranks):
        verdict = rank.verdict
        if verdict.way is not Way.RELOAD:
            verdict = whole_reload([*verdict.reasons, Refusal("the model", why)])
        with model_of_rank(config, number) as built:
            found.append(replace(rank, verdict=verdict, needed=_read(built, sources)))
    return found


def _read(model: torch.nn.Module, sources: Mapping[str, SourceSpec]) -> dict[str, list[Box]]:
    """What vLLM's own loading reads of `sources`; all of them where that cannot be told."""
    try:
        return read_by_loading(model, sources)
    except Exception as cause:  # noqa: BLE001 - as above
        _log.info("weightlane: every tensor is needed whole: %s: %s", type(cause).__name__, str(cause)[:200])
        return {name: [Box.whole(spec.shape)] for name, spec in sources.items()}


def held_experts(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Which experts a rank's model has, as ``held`` and ``of``: once for all layers that have the same, nothing for none."""
    from ...vllm_internals.internals import RoutedExperts  # noqa: PLC0415 - in a process that runs vLLM

    found: list[dict[str, Any]] = []
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            count, local = layer.global_num_experts, layer.expert_map
            held = list(range(count)) if local is None else (local >= 0).nonzero().flatten().tolist()
            entry = {"held": held, "of": count}
            if entry not in found:
                found.append(entry)
    return found
