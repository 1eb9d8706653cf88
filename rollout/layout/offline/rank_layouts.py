"""Traces, judges and rehearses the layout of every rank of a replica, one after the other in one process: see `rank_models`."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightlane.sync.version.box import Box

from ...contract.rank_group import RankGroup
from ..loading.refused_models import refuse_unsupported
from ..map.coverage import Reads
from ..map.layout_map import LayoutMap, Refusal, SourceSpec
from ..map.needs import needed_boxes
from ..proof.rehearsal import Rehearsal
from ..rank_model import RankModel
from ..trace.loading_reads import read_by_loading, unread_by_loading
from ..trace.trace import trace_loading
from ..write_method import WriteKind, WriteMethod, choose_write_method, full_reload, untraceable
from .rank_models import model_of_rank

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The layout of one rank, and how versions are written on it."""

    layout: LayoutMap
    """The layout as it was traced; without targets if tracing failed."""
    method: WriteMethod
    needed: dict[str, list[Box]]
    """The boxes of each tensor that the rank reads."""
    experts: list[dict[str, Any]]
    """See `_experts_of`."""
    learned_s: float
    """Seconds that tracing took."""
    nbytes: int
    """Bytes of the rank's parameters."""


def rank_layouts(
    config: Any, sources: Mapping[str, SourceSpec], *, tied: Collection[str], require_all: bool = False
) -> list[RankLayout]:
    """Trace loading, and choose a write method, on every rank of `config`, in rank order. All ranks reload, or none.

    The version has the tensors that some rank reads: they are the sources of the layouts.

    Args:
        config: A config from `engine_config`; this process must not have built a vLLM model before.
        sources: The tensors of the checkpoint.
        tied: Second names of tensors, which versions do not have.
        require_all: Whether the version has the tensors that no rank seems to read, too.

    Raises:
        ConfigError: A model cannot be built, or its weights cannot be replaced.
    """
    ranks = range(config.parallel_config.tensor_parallel_size)
    traced: list[tuple[LayoutMap, list[dict[str, Any]], float, int]] = []
    untraced: list[Refusal] = []
    sources = {name: spec for name, spec in sources.items() if name not in tied}
    unread = set() if require_all else set(sources)
    for rank in ranks:
        with model_of_rank(config, rank) as built:
            refuse_unsupported(built, config, config.device_config.device)
            unread &= unread_by_loading(built, sources)
            began = time.perf_counter()
            try:
                layout = trace_loading(built, sources)
            except Exception as cause:  # noqa: BLE001 - a model's loader may raise anything; versions are then loaded without copies
                untraced.append(untraceable(cause))
                layout = LayoutMap(
                    dict(sources), {}, refused_sources=[Refusal(name, untraced[0].why) for name in sources]
                )
            nbytes = sum(parameter.nbytes for parameter in built.parameters())
            traced.append((layout, _experts_of(built), time.perf_counter() - began, nbytes))
    sources = {name: spec for name, spec in sources.items() if name not in unread}
    for layout, *_ in traced:
        layout.sources = dict(sources)
        layout.refused_sources = [refusal for refusal in layout.refused_sources if refusal.tensor in sources]
    reads = [Reads.of(layout) for layout, *_ in traced]
    found = []
    for rank, (layout, experts, learned_s, nbytes) in zip(ranks, traced, strict=True):
        with model_of_rank(config, rank) as built:
            method = full_reload(dict.fromkeys(untraced)) if untraced else choose_write_method(built, layout, reads)
            needed = _read(built, sources) if method.kind is WriteKind.RELOAD else needed_boxes(layout)
            found.append(RankLayout(layout, method, needed, experts, learned_s, nbytes))
    why = next((rank.method.summary for rank in found if rank.method.kind is WriteKind.RELOAD), None)
    if why is None or all(rank.method.kind is WriteKind.RELOAD for rank in found):
        return found
    return _reloaded(config, sources, found, why)


def rehearsed(
    config: Any, sources: Mapping[str, SourceSpec], ranks: Sequence[RankLayout], *, tied: Mapping[str, str]
) -> tuple[list[RankLayout], str | None]:
    """Rehearse the methods of `ranks` as replicas do. Returns the proven ones, and the mismatch if no write method is right.

    The rehearsal needs memory for two models of a rank. Ranks are rehearsed one by one; all others seem to compute the same.

    `tied` has the first name of each tensor that is a second name of another; the rest is as for `rank_layouts`.
    """
    found = list(ranks)
    optional = {name: spec for name, spec in sources.items() if name not in ranks[0].layout.sources}
    sources = ranks[0].layout.sources
    while True:
        reloads = found[0].method.kind is WriteKind.RELOAD
        mismatch = _first_mismatch(config, found, optional, tied)
        if mismatch is not None and reloads:
            whole = {name: [Box.whole(spec.shape)] for name, spec in sources.items()}
            found = [replace(rank, needed=whole) for rank in found]
            mismatch = _first_mismatch(config, found, optional, tied)
        if mismatch is None or reloads:
            return found, mismatch
        found = _reloaded(config, sources, found, mismatch)


def _first_mismatch(
    config: Any, ranks: Sequence[RankLayout], optional: Mapping[str, SourceSpec], tied: Mapping[str, str]
) -> str | None:
    """The mismatch of the first rank whose rehearsal fails, or None."""
    for number, rank in enumerate(ranks):
        with model_of_rank(config, number) as built:
            this_rank = RankModel(built, config, torch.device(config.device_config.device), f"rank {number}")
            rehearsal = Rehearsal(this_rank, rank.layout.sources, RankGroup(None), optional=optional, tied=tied)
            read = rank.needed if rank.method.kind is WriteKind.RELOAD else None
            if (mismatch := rehearsal.first_mismatch(rank.method, read)) is not None:
                return mismatch
    return None


def _reloaded(
    config: Any, sources: Mapping[str, SourceSpec], ranks: Sequence[RankLayout], why: str
) -> list[RankLayout]:
    """`ranks` with the method by which every tensor goes through vLLM's own loading."""
    found = []
    for number, rank in enumerate(ranks):
        method = rank.method
        if method.kind is not WriteKind.RELOAD:
            method = full_reload([*method.reasons, Refusal("the model", why)])
        with model_of_rank(config, number) as built:
            found.append(replace(rank, method=method, needed=_read(built, sources)))
    return found


def _read(model: torch.nn.Module, sources: Mapping[str, SourceSpec]) -> dict[str, list[Box]]:
    """The boxes of `sources` that vLLM's own loading reads; whole tensors if tracing fails."""
    try:
        return read_by_loading(model, sources)
    except Exception as cause:  # noqa: BLE001 - as above
        _log.info("weightlane: every tensor is needed whole: %s: %s", type(cause).__name__, str(cause)[:200])
        return {name: [Box.whole(spec.shape)] for name, spec in sources.items()}


def _experts_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The experts of a rank's model: ``held``, their numbers, and ``of``, their total, once for all layers with the same ones."""
    from ...vllm_surface import RoutedExperts  # noqa: PLC0415 - in a process that runs vLLM

    found: list[dict[str, Any]] = []
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            count, local = layer.global_num_experts, layer.expert_map
            held = list(range(count)) if local is None else (local >= 0).nonzero().flatten().tolist()
            entry = {"held": held, "of": count}
            if entry not in found:
                found.append(entry)
    return found
