"""Learns a `LayoutMap` by watching a model's own ``load_weights`` load tensors that have no data.

Every operator that torch runs is intercepted. A copy into a live parameter is recorded and not executed, so that the model stays
as it is. Copies between other tensors are followed by `Origins`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..map.layout_map import LayoutMap, SourceSpec
from .origins import Computed, Filled, Moved, Origins, operator_name, storage_of, stored_elements
from .recorder import CopyRecorder

_aten = torch.ops.aten
_log = logging.getLogger(__name__)

_MOST_FAILURES = 16
"""Most tensors that are left out because they cannot be loaded without data: each costs a trace from the start."""
_CREATIONS = frozenset(
    {"empty_like", "zeros_like", "ones_like", "full_like"}
    | {"new_empty", "new_zeros", "new_full", "new_ones", "new_empty_strided"}
)
"""Operators that take the shape of an input and none of its values."""
_FILLS = frozenset({"fill_", "zero_"})


def trace_loading(model: torch.nn.Module, sources: Mapping[str, SourceSpec]) -> LayoutMap:
    """Learn where ``model.load_weights`` puts each element of `sources`. The model is unchanged when this returns.

    Runs inside vLLM's current config, as a load does. Tensors that cannot be loaded without data are refused and left out.

    Raises:
        Exception: The error of the model's loading, when leaving tensors out does not help.
    """
    failed: dict[str, str] = {}
    while True:
        origins = Origins(sources)
        recorder = CopyRecorder(model, origins)
        last: list[str] = []

        def feed(origins: Origins = origins, last: list[str] = last) -> Iterator[tuple[str, torch.Tensor]]:
            for name in sources:
                if name not in failed:
                    last[:] = [name]
                    yield name, origins.fed(name)

        with restored_afterwards(model) as replaced, torch.no_grad():
            try:
                with _Tracer(origins, recorder):
                    model.load_weights(feed())  # type: ignore[operator]
            except Exception as cause:
                if not last or len(failed) == _MOST_FAILURES:
                    raise
                failed[last[0]] = f"loading it needs its values: {type(cause).__name__}: {str(cause)[:160]}"
                _log.debug("weightlane: %s cannot be traced", last[0], exc_info=True)
                continue
        for target in replaced:
            recorder.refuse(target, "loading puts another tensor in its place")
        return recorder.layout(failed)


@contextmanager
def restored_afterwards(model: torch.nn.Module) -> Iterator[list[str]]:
    """Afterwards, modules hold the same parameters, buffers and attributes as before.

    Values are not restored: nothing inside may write to live tensors. Yields a list, to which the full names of the tensors that
    were replaced inside are added in the end.
    """
    before: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (prefix, holder, dict(holder))
        for prefix, module in model.named_modules()
        for holder in (module.__dict__, module._parameters, module._buffers)
    ]
    data = [(name, tensor, tensor.data) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    replaced: list[str] = []
    try:
        yield replaced
    finally:
        for prefix, holder, held in before:
            for name in holder.keys() | held.keys():
                was, now = held.get(name), holder.get(name)
                if was is not now and isinstance(now if now is not None else was, torch.Tensor):
                    replaced.append(f"{prefix}.{name}".lstrip("."))
            if any(holder.get(name) is not value for name, value in held.items()) or len(holder) != len(held):
                holder.clear()
                holder.update(held)
        for name, tensor, was in data:
            if tensor.data.untyped_storage()._cdata != was.untyped_storage()._cdata:
                tensor.data = was
                replaced.append(name)


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts every operator while it is active."""

    def __init__(self, origins: Origins, recorder: CopyRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins, self._recorder = origins, recorder
        self._made: set[int] = set()
        """Storages that operators have made since tracing began."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every operator."""
        kwargs = kwargs or {}
        inputs = [item for value in (*args, *kwargs.values()) for item in _tensors(value)]
        known = [tensor for tensor in inputs if tensor in self._origins]
        live = [target for tensor in inputs if (target := self._recorder.target_of(tensor)) is not None]
        if func is _aten.copy_.default and (known or live):
            return self._copy(func, *args[:2])
        if func._schema.is_mutable and (known or live):
            return self._change(func, args, known)
        if known and "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("meta")}
        result = func(*args, **kwargs)
        for output in _tensors(result):
            if all(storage_of(tensor) != storage_of(output) for tensor in inputs):  # Not a view.
                self._created(func, args, kwargs, inputs, output)
        return result

    def _created(self, func: Any, args: Any, kwargs: Mapping[str, Any], inputs: list[torch.Tensor], out: Any) -> None:
        """Follow an operator that made a new storage."""
        self._made.add(storage_of(out))
        self._origins.forget(out)
        name = operator_name(func)
        if name in _CREATIONS:
            return
        read = [target for tensor in inputs if (target := self._recorder.target_of(tensor)) is not None]
        for target in read:
            if target in self._recorder.written:
                self._recorder.refuse(target, f"loading reads it back ({name})")
        known = [tensor for tensor in inputs if tensor in self._origins]
        if read and not any(isinstance(self._origins.of(tensor), Computed) for tensor in known):
            why = f"it is computed from {read[0]} ({name})"
            self._origins.note(out, Computed(why, self._origins.sources_of(*known)))
        elif known:
            self._origins.follow(func, args, kwargs, inputs, out)

    def _copy(self, func: Any, destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Record a copy into a live parameter, which is never executed, or follow another copy."""
        if (target := self._recorder.target_of(destination)) is not None:
            self._recorder.copy(target, destination, source)
            return destination
        made, known = storage_of(destination) in self._made, source in self._origins
        if not made and (live := self._recorder.target_of(source)) is not None:
            self._recorder.refuse(live, "loading copies it elsewhere")
        elif not made and known and destination not in self._origins:
            for name in sorted(self._origins.sources_of(source)):
                self._recorder.refuse_source(name, "it is kept in a tensor that is neither parameter nor buffer")
        else:
            self._origins.follow_copy(destination, source)
            if not known and made and not destination.is_meta and isinstance(self._origins.of(destination), Moved):
                func(destination, source)
        return destination

    def _change(self, func: Any, args: tuple[Any, ...], known: list[torch.Tensor]) -> Any:
        """Follow an operator that changes a tensor in place, which is never executed."""
        name = operator_name(func)
        changed = args[0] if args and isinstance(args[0], torch.Tensor) else None
        sources = self._origins.sources_of(*known)
        if changed is not None and (target := self._recorder.target_of(changed)) is not None:
            filled = name in _FILLS and not known and self._recorder.fill(target, changed, _filled_with(args))
            if not filled:
                self._recorder.written.add(target)
                self._recorder.refuse(target, f"it is changed in place ({name})", sources)
            return changed
        for tensor in (item for value in args for item in _tensors(value)):
            if (other := self._recorder.target_of(tensor)) is not None:
                self._recorder.refuse(other, f"it is used by {name}, which is not followed", sources)
        origin = Computed(f"its values are transformed ({name})", sources)
        if (
            name in _FILLS
            and changed is not None
            and all(item is changed for item in known)
            and changed.numel() == stored_elements(changed)
        ):
            origin = Filled(origin.why, sources, _filled_with(args))
        for tensor in known if changed is None else [changed]:
            self._origins.note(tensor, origin)
        return changed


def _filled_with(args: tuple[Any, ...]) -> float:
    value = args[1] if len(args) > 1 else 0.0
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, list | tuple) else []
