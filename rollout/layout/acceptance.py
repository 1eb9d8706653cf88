"""Decides what of a traced layout may be committed by copies, and what has to go through vLLM's own loading.

The rule: no tensor refused, nothing unmapped or doubly mapped, nothing unused over all ranks, no layer that holds its weights in
a form of its own. What breaks it is reloaded layer by layer in the same commit, if that is a small, closed part of the model;
else the whole version is. That equal parameters mean equal compute is for `equal_compute` to show.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch

from .loading.derived import derives, made_after_loading
from .map.coverage import target_coverage, unused_elements
from .map.layout_map import LayoutMap, Refusal

_LARGEST_RELOADED_SHARE = 0.5


class Way(StrEnum):
    """How versions get into a model."""

    TRACED = "traced"
    """By copies alone."""
    MIXED = "mixed"
    """By copies; some layers through vLLM's own loading."""
    RELOAD = "reload"
    """Through vLLM's own loading."""


@dataclass(frozen=True)
class Verdict:
    """What was decided about one rank's layout."""

    way: Way
    layout: LayoutMap
    """The part that is committed by copies; empty for `Way.RELOAD`."""
    modules: tuple[str, ...]
    """Layers that are reloaded, layers inside of them not included; none for `Way.RELOAD`."""
    sources: frozenset[str]
    """The checkpoint tensors that they are made of."""
    reasons: tuple[Refusal, ...]
    """Everything that is not copied, and why."""
    derived: tuple[str, ...] = ()
    """Layers that make tensors of what others have loaded, after every commit; vLLM's own loading does so by itself."""

    @property
    def summary(self) -> str:
        """The reasons in one line."""
        shown = "; ".join(f"{reason.tensor}: {reason.why}" for reason in self.reasons[:3])
        return shown + (f" (and {len(self.reasons) - 3} more)" if len(self.reasons) > 3 else "")  # noqa: PLR2004


def judge(
    model: torch.nn.Module, layout: LayoutMap, everyone: Sequence[LayoutMap], *, tied: Collection[str] = ()
) -> Verdict:
    """Apply the rule to this rank's `layout`.

    Args:
        model: The live model, inside vLLM's current config.
        layout: What tracing it gave.
        everyone: The layouts of all ranks, this one's included.
        tied: Checkpoint names that loading may ignore, since they are another tensor under a second name.
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
    excused = {refusal.tensor for rank in everyone for refusal in rank.refused_sources} | set(tied)
    excused |= {source for rank in everyone for source, _ in rank.feeds}
    broken += [
        Refusal(name, f"{count} of its elements are used by no rank")
        for name, count in unused_elements(everyone).items()
        if name not in excused
    ]
    if broken:
        return whole_reload((*broken, *(reason for reason in reasons if reason not in broken)))
    if not refused and not layout.refused_sources:
        return Verdict(Way.TRACED, layout, (), frozenset(), (), tuple(sorted(derived)))
    return replace(_mixed(model, layout, set(refused), tuple(reasons)), derived=tuple(sorted(derived)))


def untraceable(cause: Exception) -> Refusal:
    """That nothing is copied, since loading raised `cause` when it was traced."""
    return Refusal("the model", f"its loading cannot be traced: {type(cause).__name__}: {str(cause)[:200]}")


def whole_reload(reasons: Iterable[Refusal]) -> Verdict:
    """The verdict that nothing is copied."""
    return Verdict(Way.RELOAD, LayoutMap({}, {}), (), frozenset(), tuple(reasons))


def _mixed(model: torch.nn.Module, layout: LayoutMap, modules: set[str], reasons: tuple[Refusal, ...]) -> Verdict:
    """Close the refused part over layers and tensors: a layer is reloaded whole, a tensor goes one way only."""
    sources = {refusal.tensor for refusal in layout.refused_sources}
    owners = {target: _owner(target, model) for target in layout.targets}
    flows = {(piece.source, owners[piece.target]) for piece in layout.slices}
    flows |= {(source, owners.get(target, _owner(target, model))) for source, target in layout.feeds}
    while True:
        inside = {source for source, owner in flows if owner in modules}
        fed = {owner for source, owner in flows if source in sources | inside}
        if inside <= sources and fed <= modules:
            break
        sources |= inside
        modules |= fed
    kept = layout.without(sources, [target for target, owner in owners.items() if owner in modules])
    total = sum(spec.numel * spec.dtype.itemsize for spec in layout.sources.values())
    share = sum(spec.numel * spec.dtype.itemsize for name, spec in layout.sources.items() if name in sources) / total
    if share > _LARGEST_RELOADED_SHARE:
        return whole_reload((*reasons, Refusal("the model", f"{share:.0%} of it would have to be reloaded")))
    if (tie := _tied_across(model, modules)) is not None:
        return whole_reload((*reasons, Refusal(tie, "it is shared with a layer that need not be reloaded")))
    if not modules:
        return whole_reload((*reasons, Refusal("the model", "what is refused belongs to no layer")))
    return Verdict(Way.MIXED, kept, tuple(sorted(modules)), frozenset(sources), reasons)


def repacked(model: torch.nn.Module) -> dict[str, str]:
    """Parameters of layers that compute from something other than the tensors that loading fills, and what tells so.

    vLLM keeps what each layer looked like before its weights were processed; a layer that looks different now was repacked.
    """
    from ..vllm_internals.internals import get_layerwise_info  # noqa: PLC0415 - in a worker only

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
            elif was is not None and _looks(was) != _looks(tensor):
                found[full] = "the layer keeps this weight in a form of its own"
        if parameters and (kernel := _private_kernel(module)) is not None:
            found[f"{prefix}.{next(iter(parameters))}".lstrip(".")] = kernel
    return found


def _private_kernel(module: Any) -> str | None:
    """What tells that a linear layer on CPU computes from a packed copy; see `weightlane.rollout.vllm_internals.cpu_linear`."""
    linear = module.__dict__.get("cpu_linear")
    if linear is not None and linear is not torch.nn.functional.linear:
        return "the layer computes from a packed copy of this weight"
    return None


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _owner(target: str, model: torch.nn.Module) -> str:
    """The innermost module that `target`, a parameter, buffer or attribute, belongs to."""
    parts = target.split(".")[:-1]
    while parts:
        try:
            model.get_submodule(".".join(parts))
        except AttributeError:
            parts.pop()
        else:
            break
    return ".".join(parts)


def _tied_across(model: torch.nn.Module, modules: Collection[str]) -> str | None:
    """A parameter of `modules` that a layer outside of them computes with too."""
    inside: dict[int, str] = {}
    outside: set[int] = set()
    for name, tensor in model.named_parameters(remove_duplicate=False):
        storage = tensor.untyped_storage()._cdata
        if _owner(name, model) in modules:
            inside[storage] = name
        else:
            outside.add(storage)
    return next((name for storage, name in inside.items() if storage in outside), None)
