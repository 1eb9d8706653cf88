"""`choose_write_method`: which part of a traced layout is committed by copies, and which part goes through vLLM's own loading.

The rule for copies: no tensor is refused, no element is unmapped or mapped twice, every element is used by some rank, and no
layer repacks its weights. Layers that break the rule are reloaded in the same commit if they are a small, closed part of the
model. Otherwise everything is reloaded. `rehearsal` proves the choice later, and that equal parameters mean equal compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch

from .loading.derived import derives, made_after_loading
from .map.coverage import Reads, target_coverage, unused_elements
from .map.layout_map import LayoutMap, Refusal

_LARGEST_RELOADED_SHARE = 0.5
"""Largest share of a model's bytes that is reloaded if the rest is copied: with a larger one copies save little."""
_SHOWN_REASONS = 3
"""Most reasons in a summary, so that it stays one readable line."""


class WriteKind(StrEnum):
    """A kind of write method."""

    TRACED = "traced"
    """Copies write every tensor."""
    MIXED = "mixed"
    """Copies write most tensors; some layers go through vLLM's own loading."""
    RELOAD = "reload"
    """vLLM's own loading writes every tensor."""


@dataclass(frozen=True)
class WriteMethod:
    """How versions are written into one rank's model, with the reasons."""

    kind: WriteKind
    layout: LayoutMap
    """The part that is committed by copies; empty for `WriteKind.RELOAD`."""
    reloaded_layers: tuple[str, ...]
    """Layers that are reloaded, without layers inside of them; none for `WriteKind.RELOAD`."""
    reloaded_sources: frozenset[str]
    """The checkpoint tensors that `reloaded_layers` are made of."""
    reasons: tuple[Refusal, ...]
    """The reasons why tensors are not copied."""
    derived: tuple[str, ...] = ()
    """Layers that derive tensors from other layers' parameters after every commit; vLLM's own loading does so by itself."""

    @property
    def summary(self) -> str:
        """The reasons in one line."""
        shown = "; ".join(f"{reason.tensor}: {reason.why}" for reason in self.reasons[:_SHOWN_REASONS])
        more = len(self.reasons) - _SHOWN_REASONS
        return shown + (f" (and {more} more)" if more > 0 else "")


def choose_write_method(model: torch.nn.Module, layout: LayoutMap, all_ranks: Sequence[Reads]) -> WriteMethod:
    """Choose how versions are written into the live `model`, which `layout` was traced from, inside vLLM's current config.

    `all_ranks` are the parts of a version that the ranks use, this one among them.
    """
    refused = {_owner(target, model): f"{target}: {why}" for target, why in repacked(model).items()}
    reasons = [Refusal(module, why) for module, why in refused.items()]
    reasons += [*layout.refused_sources, *layout.refused_targets]
    for refusal in layout.refused_targets:
        refused.setdefault(_owner(refusal.tensor, model), refusal.why)
    explained = bool(layout.refused_sources)
    broken: list[Refusal] = []
    late, derived = made_after_loading(model), set()
    for name, counts in target_coverage(layout).items():
        if not counts.unmapped and not counts.doubled:
            continue
        owner = _owner(name, model)
        if name in late and derives(model.get_submodule(owner)):
            derived.add(owner)
            continue
        missing = f"{counts.unmapped} of its elements are not loaded"
        why = f"{counts.doubled} of its elements are loaded more than once" if counts.doubled else missing
        if counts.unmapped and not explained and owner not in refused:
            broken.append(Refusal(name, why))
        if owner not in refused:
            reasons.append(Refusal(name, why))
        refused.setdefault(owner, why)
    broken += [
        Refusal(name, f"{count} of its elements are used by no rank")
        for name, count in unused_elements(layout.sources, all_ranks).items()
    ]
    if broken:
        return full_reload((*broken, *(reason for reason in reasons if reason not in broken)))
    if not refused and not layout.refused_sources:
        return WriteMethod(WriteKind.TRACED, layout, (), frozenset(), (), tuple(sorted(derived)))
    return replace(_mixed(model, layout, set(refused), tuple(reasons)), derived=tuple(sorted(derived)))


def untraceable(cause: Exception) -> Refusal:
    """The reason for a full reload if loading raised `cause` while it was traced."""
    return Refusal("the model", f"its loading cannot be traced: {type(cause).__name__}: {str(cause)[:200]}")


def full_reload(reasons: Iterable[Refusal]) -> WriteMethod:
    """The method by which every tensor goes through vLLM's own loading."""
    return WriteMethod(WriteKind.RELOAD, LayoutMap({}, {}), (), frozenset(), tuple(reasons))


def _mixed(model: torch.nn.Module, layout: LayoutMap, modules: set[str], reasons: tuple[Refusal, ...]) -> WriteMethod:
    """Extend the refused part until no layer and no tensor is both reloaded and copied."""
    sources = {refusal.tensor for refusal in layout.refused_sources}
    owners = {target: _owner(target, model) for target in layout.targets}
    flows = {(copy.source, owners[copy.target]) for copy in layout.copies}
    flows |= {(source, owners.get(target, _owner(target, model))) for source, target in layout.feeds}
    while True:
        inside = {source for source, owner in flows if owner in modules}
        fed = {owner for source, owner in flows if source in sources | inside}
        if inside <= sources and fed <= modules:
            break
        sources |= inside
        modules |= fed
    copied = layout.without(sources, [target for target, owner in owners.items() if owner in modules])
    total = sum(spec.numel * spec.dtype.itemsize for spec in layout.sources.values())
    share = sum(spec.numel * spec.dtype.itemsize for name, spec in layout.sources.items() if name in sources) / total
    if share > _LARGEST_RELOADED_SHARE:
        return full_reload((*reasons, Refusal("the model", f"{share:.0%} of it would have to be reloaded")))
    if not modules:
        return full_reload((*reasons, Refusal("the model", "the refused tensors belong to no layer")))
    return WriteMethod(WriteKind.MIXED, copied, tuple(sorted(modules)), frozenset(sources), reasons)


def repacked(model: torch.nn.Module) -> dict[str, str]:
    """Parameters of layers that compute from other tensors than those that loading fills, each with the evidence.

    vLLM keeps the shapes, strides and dtypes of each layer before processing; a layer that differs now was repacked.
    """
    from ..vllm_surface import get_layerwise_info  # noqa: PLC0415 - in a worker only

    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        before: dict[str, torch.Tensor] = {}
        for tensors in get_layerwise_info(module).restore_metadata:
            before |= tensors
        parameters = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
        for name, tensor in parameters.items():
            was = before.get(name)
            full = f"{prefix}.{name}".lstrip(".")
            if tensor.is_meta or (not tensor.numel() and (was is None or was.numel())):
                found[full] = "the layer keeps this weight elsewhere"
            elif was is not None and _layout(was) != _layout(tensor):
                found[full] = "the layer repacks this weight"
        if parameters and (kernel := _private_kernel(module)) is not None:
            found[f"{prefix}.{next(iter(parameters))}".lstrip(".")] = kernel
    return found


def _private_kernel(module: Any) -> str | None:
    """The evidence that a linear layer on CPU computes from a packed copy; see `vllm_cpu.layers`."""
    linear = module.__dict__.get("cpu_linear")
    if linear is not None and linear is not torch.nn.functional.linear:
        return "the layer computes from a packed copy of this weight"
    return None


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _owner(target: str, model: torch.nn.Module) -> str:
    """The innermost module that has `target`, a parameter, buffer or attribute."""
    parts = target.split(".")[:-1]
    while parts:
        try:
            model.get_submodule(".".join(parts))
        except AttributeError:
            parts.pop()
        else:
            break
    return ".".join(parts)
