"""Learns a `LayoutMap` by watching a model load tensors that have no data.

A view never changes a tensor's storage, so at ``aten.copy_`` torch itself knows everything: the source's storage says which
checkpoint tensor it is, the destination's which parameter, and their offsets and strides which elements. Nothing is executed on
live parameters. What makes a new storage is either pure movement (clone, cat, index, ...), which is followed element by element
by doing the same to element numbers, or it computes something, and is refused by name when it reaches a parameter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..map.geometry import Cover, joined, make_slice, overlaps_itself, repeated_parts, target_block
from ..map.layout_map import Constant, LayoutMap, Refusal, Slice, SourceSpec, TargetSpec
from .element_runs import strided_runs
from .untouched import Untouched

_aten = torch.ops.aten
_log = logging.getLogger(__name__)

_ELEMENT_BITS = 40
_ELEMENT = (1 << _ELEMENT_BITS) - 1
_MOST_FOLLOWED = 1 << 29
"""Elements of one temporary that are followed one by one; more would take too much memory."""
_MOST_PIECES = 1 << 14
_MOST_FAILURES = 16

_MOVES = frozenset(
    getattr(getattr(_aten, operator), overload)
    for operator, overload in (
        ("clone", "default"),
        ("_to_copy", "default"),
        ("cat", "default"),
        ("stack", "default"),
        ("index_select", "default"),
        ("index", "Tensor"),
        ("gather", "default"),
        ("constant_pad_nd", "default"),
        ("repeat", "default"),
        ("flip", "default"),
        ("roll", "default"),
        ("repeat_interleave", "self_int"),
        ("_unsafe_view", "default"),
        ("permute_copy", "default"),
    )
    if hasattr(_aten, operator) and hasattr(getattr(_aten, operator), overload)
)
"""Operators whose results hold elements of their inputs and nothing else."""
_COPIES = frozenset({_aten.clone.default, _aten._to_copy.default})
"""Those of them whose results are laid out as their input is."""
_CREATIONS = frozenset(
    f"{kind}_{how}"
    for kind, hows in (
        ("empty", ("like",)),
        ("zeros", ("like",)),
        ("ones", ("like",)),
        ("full", ("like",)),
        ("new", ("empty", "zeros", "full", "ones", "empty_strided")),
    )
    for how in hows
)
"""Operators that take the shape of an input and none of its values."""
_FILLS = frozenset({"fill_", "zero_"})


@dataclass(frozen=True, slots=True)
class _Whole:
    """A storage that is a checkpoint tensor."""

    index: int


@dataclass(frozen=True, slots=True)
class _Arranged:
    """A dense storage that holds a view of a checkpoint tensor, such as a transposed one."""

    index: int
    offset: int
    """Number of the source's element that is its first."""
    dims: tuple[tuple[int, int, int], ...]
    """Stride in the storage, length, and stride in the source; largest stride in the storage first."""
    dtype: torch.dtype


@dataclass(slots=True)
class _Moved:
    """A storage that holds elements of checkpoint tensors in another order."""

    ids: torch.Tensor
    """For each element of the storage: number of the source and of its element, or -1."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Computed:
    """A storage that holds something else."""

    why: str
    sources: frozenset[str] = frozenset()
    """The checkpoint tensors it was made of."""


@dataclass(frozen=True, slots=True)
class _Filled(_Computed):
    """A storage that was a checkpoint tensor's and holds one number now: what a rank gets that must not add a bias again."""

    value: float = 0.0


_Origin = _Whole | _Arranged | _Moved | _Computed


def trace_loading(model: torch.nn.Module, sources: Mapping[str, SourceSpec]) -> LayoutMap:
    """Where `model`'s own ``load_weights`` puts each element of `sources`; the model is as before when this returns.

    Runs inside vLLM's current config, as a load does. Tensors that cannot be loaded without data are refused and left out.

    Raises:
        Exception: What loading raised, when leaving tensors out does not help.
    """
    failed: dict[str, str] = {}
    while True:
        attempt = _Tracer(model, sources)
        last: list[str] = []

        def feed(attempt: _Tracer = attempt, last: list[str] = last) -> Iterator[tuple[str, torch.Tensor]]:
            for name in sources:
                if name not in failed:
                    last[:] = [name]
                    yield name, attempt.feed(name)

        with Untouched(model) as untouched, torch.no_grad():
            try:
                with attempt:
                    model.load_weights(feed())  # type: ignore[operator]
            except Exception as cause:
                if not last or len(failed) == _MOST_FAILURES:
                    raise
                failed[last[0]] = f"loading it needs its values: {type(cause).__name__}: {str(cause)[:160]}"
                _log.debug("weightlane: %s cannot be traced", last[0], exc_info=True)
                continue
        for target, why in untouched.changes:
            attempt.refuse(target, why)
        return attempt.finish(failed)


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is copied where while it is active."""

    def __init__(self, model: torch.nn.Module, sources: Mapping[str, SourceSpec]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._specs = dict(sources)
        self._names = list(sources)
        self._live: dict[str, torch.Tensor] = {}
        self._targets: dict[int, str] = {}
        self._parameters = {name for name, _ in model.named_parameters()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            # The first name of a storage stands for all views of it.
            if tensor.numel() and _storage(tensor) not in self._targets:
                self._targets[_storage(tensor)] = name
                self._live[name] = tensor
        self._origins: dict[int, _Origin] = {}
        self._made: set[int] = set()
        self._alive: list[torch.Tensor] = []
        self._slices: list[Slice] = []
        self._constants: list[tuple[int, Constant]] = []
        self._written: set[str] = set()
        self._refused: dict[str, str] = {}
        self._refused_sources: dict[str, str] = {}
        self._feeds: set[tuple[str, str]] = set()

    def feed(self, name: str) -> torch.Tensor:
        """A tensor without data that stands for the checkpoint tensor `name`."""
        spec = self._specs[name]
        with _disable_current_modes():
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        self._note(tensor, _Whole(self._names.index(name)))
        return tensor

    def refuse(self, target: str, why: str, sources: Iterable[str] = ()) -> None:
        """Say why a parameter gets something other than copies, and of what; the first reason stays."""
        self._refused.setdefault(target, why)
        self._feeds |= {(source, target) for source in sources}

    def finish(self, failed: Mapping[str, str]) -> LayoutMap:
        """What was recorded."""
        self._judge_constants()
        wanted = {name for name in self._live if name in self._parameters} | self._written | self._refused.keys()
        return LayoutMap(
            sources=self._specs,
            targets={name: TargetSpec.of(tensor) for name, tensor in self._live.items() if name in wanted},
            slices=joined(self._slices),
            constants=[constant for _, constant in self._constants],
            refused_sources=[Refusal(*item) for item in {**self._refused_sources, **failed}.items()],
            refused_targets=[Refusal(*item) for item in self._refused.items()],
            feeds=sorted(self._feeds),
        )

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
        known = [tensor for tensor in inputs if _storage(tensor) in self._origins]
        live = [tensor for tensor in inputs if _storage(tensor) in self._targets]
        if func is _aten.copy_.default and (known or live):
            return self._copy(func, *args[:2])
        if func._schema.is_mutable and (known or live):
            return self._write(func, args, known)
        if known and "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("meta")}
        result = func(*args, **kwargs)
        for output in _tensors(result):
            self._follow(func, args, kwargs, inputs, output)
        return result

    def _follow(self, func: Any, args: Any, kwargs: Mapping[str, Any], inputs: list[torch.Tensor], out: Any) -> None:
        """Note where the elements of a new tensor come from."""
        key = _storage(out)
        if any(_storage(tensor) == key for tensor in inputs):
            return  # A view.
        self._made.add(key)
        self._origins.pop(key, None)  # Whose storage this was is gone.
        name = _operator(func)
        if name in _CREATIONS:
            return
        read = [self._targets[_storage(tensor)] for tensor in inputs if _storage(tensor) in self._targets]
        for target in read:
            if target in self._written:
                self.refuse(target, f"loading reads it back ({name})")
        known = [tensor for tensor in inputs if _storage(tensor) in self._origins]
        if not known and not read:
            return
        origins = [self._origins[_storage(tensor)] for tensor in known]
        why = next((origin.why for origin in origins if isinstance(origin, _Computed)), None)
        if why is None and read:
            why = f"it is computed from {read[0]} ({name})"
        elif why is None and func not in _MOVES:
            why = f"its values are transformed ({name})"
        elif why is None and any(tensor.dtype != out.dtype and self._was_cast(tensor) for tensor in known):
            why = f"it is cast to {known[0].dtype} on its way"
        if why is None:
            self._note(out, self._arranged(func, args, out) or self._moved(func, args, kwargs, inputs, out))
        else:
            self._note(out, _Computed(why, self._named_by(*known)))

    def _arranged(self, func: Any, args: Any, out: torch.Tensor) -> _Arranged | None:
        """The origin of `out` if it is a copy of one view, which need not be followed element by element."""
        if func not in _COPIES or self._dtype(args[0]) != args[0].dtype:
            return None
        found = self._in_source(args[0])
        dims = sorted(zip(out.stride(), out.size(), strict=True), reverse=True)
        dense = all(stride == math.prod(length for _, length in dims[at + 1 :]) for at, (stride, _) in enumerate(dims))
        if found is None or not dense or _stored(out) != out.numel():
            return None
        index, offset, strides = found
        return _Arranged(
            index, offset, tuple(sorted(zip(out.stride(), out.size(), strides, strict=True), reverse=True)), out.dtype
        )

    def _in_source(self, tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...]] | None:
        """Number of the checkpoint tensor that `tensor` is a view of, and the view's offset and strides in it."""
        origin = self._origins.get(_storage(tensor))
        if isinstance(origin, _Whole):
            return origin.index, _offset(tensor), tuple(tensor.stride())
        if not isinstance(origin, _Arranged):
            return None
        offset, rest, room = origin.offset, _offset(tensor), []
        for stride, length, step in origin.dims:
            start, rest = divmod(rest, stride)
            offset += start * step
            room.append(length - start)
        strides = []
        for length, stride in zip(tensor.size(), tensor.stride(), strict=True):
            if length == 1 or stride == 0:
                strides.append(0)
                continue
            for at, (unit, _, step) in enumerate(origin.dims):
                times, odd = divmod(stride, unit)
                if times and not odd and room[at] > (length - 1) * times:
                    room[at] -= (length - 1) * times
                    strides.append(times * step)
                    break
            else:
                return None
        return origin.index, offset, tuple(strides)

    def _moved(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], out: torch.Tensor) -> _Origin:
        """The origin of `out`, found by doing to element numbers what was done to elements."""
        before = {self._dtype(tensor) for tensor in inputs if _storage(tensor) in self._origins}
        seen = {tensor.dtype for tensor in inputs if _storage(tensor) in self._origins}
        if len(before) > 1 or before != seen:
            known = [tensor for tensor in inputs if _storage(tensor) in self._origins]
            return _Computed(f"bits are read as another type ({_operator(func)})", self._named_by(*known))
        if _stored(out) > _MOST_FOLLOWED:
            why = f"it is rearranged ({_operator(func)}) and too large to be followed"
            return _Computed(why, self._named_by(*inputs))
        with _disable_current_modes():
            if func in _COPIES:
                ids = self._ids(args[0])
            else:
                numbers = [_mapped(value, self._numbers) for value in args]
                if func is _aten.constant_pad_nd.default:
                    numbers[2:] = [-1]
                options = {key: value for key, value in kwargs.items() if key not in {"dtype", "device"}}
                ids = func(*numbers, **options)
            stored = torch.full((_stored(out),), -1, dtype=torch.int64)
            stored.as_strided(out.size(), out.stride(), _offset(out)).copy_(ids)
        return _Moved(stored, out.dtype)

    def _numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element numbers in place of a checkpoint tensor; anything else, such as an index, as it is."""
        return self._ids(tensor) if _storage(tensor) in self._origins else tensor

    def _ids(self, tensor: torch.Tensor) -> torch.Tensor:
        origin = self._origins.get(_storage(tensor))
        if isinstance(origin, _Moved):
            return origin.ids.as_strided(tensor.size(), tensor.stride(), _offset(tensor))
        if isinstance(origin, _Arranged):
            with _disable_current_modes():
                lengths, steps = ([dim[at] for dim in origin.dims] for at in (1, 2))
                first = (origin.index << _ELEMENT_BITS) + origin.offset
                stored = _positions(lengths, steps, first).contiguous().flatten()
                return stored.as_strided(tensor.size(), tensor.stride(), _offset(tensor))
        assert isinstance(origin, _Whole), "what is computed is not followed"
        first = (origin.index << _ELEMENT_BITS) + _offset(tensor)
        return _positions(tensor.size(), tensor.stride(), first)

    def _dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """The type in which the elements of `tensor` were made, which a view may read as another."""
        origin = self._origins[_storage(tensor)]
        if isinstance(origin, _Whole):
            return self._specs[self._names[origin.index]].dtype
        return origin.dtype if isinstance(origin, _Moved | _Arranged) else tensor.dtype

    def _was_cast(self, tensor: torch.Tensor) -> bool:
        """Whether its elements are not in the type that they came in."""
        return any(self._specs[name].dtype != self._dtype(tensor) for name in self._named_by(tensor))

    def _copy(self, func: Any, destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        target = self._targets.get(_storage(destination))
        origin = self._origins.get(_storage(source))
        if target is not None:
            if _storage(source) in self._targets:
                self.refuse(target, f"it is copied from {self._targets[_storage(source)]}")
            elif origin is None:
                self.refuse(target, "it gets values that are not the checkpoint's")
            else:
                self._record(target, destination, source, origin)
            self._written.add(target)
            return destination  # Never executed on live parameters.
        key = _storage(destination)
        if _is_in(source, self._targets) and key not in self._made:
            self.refuse(self._targets[_storage(source)], "loading copies it elsewhere")
            return destination
        if origin is not None and key not in self._made and key not in self._origins:
            for name in sorted(self._named_by(source)):
                self._refused_sources.setdefault(name, "it is kept in a tensor that is neither parameter nor buffer")
            return destination
        self._copy_aside(func, destination, source, origin)
        return destination

    def _copy_aside(self, func: Any, destination: torch.Tensor, source: torch.Tensor, origin: _Origin | None) -> None:
        """Follow a copy into a temporary."""
        key, already = _storage(destination), self._origins.get(_storage(destination))
        if isinstance(already, _Computed):
            return
        if isinstance(origin, _Computed):
            self._note(destination, origin)
            return
        why = None
        if isinstance(already, _Whole | _Arranged):
            why = "it is overwritten while loading"
        elif origin is not None and self._dtype(source) != source.dtype:
            why = "bits are read as another type (copy_)"
        elif origin is not None and source.dtype != destination.dtype:
            why = f"it is cast to {destination.dtype} on its way"
        if why is not None:
            self._note(destination, _Computed(why, self._named_by(source, destination)))
            return
        with _disable_current_modes():
            if already is None:
                already = _Moved(torch.full((_stored(destination),), -1, dtype=torch.int64), destination.dtype)
                self._note(destination, already)
            assert isinstance(already, _Moved), "the others have returned"
            place = already.ids.as_strided(destination.size(), destination.stride(), _offset(destination))
            if origin is not None:
                place.copy_(self._ids(source).expand(destination.size()))
            else:
                place.fill_(-1)
        if origin is None and key in self._made and not destination.is_meta:
            func(destination, source)

    def _record(self, target: str, destination: torch.Tensor, source: torch.Tensor, origin: _Origin) -> None:
        live = self._live[target]
        view = (_offset(destination), tuple(destination.stride()), tuple(destination.size()))
        if isinstance(origin, _Filled) and destination.dtype == live.dtype:
            self._record_constant(target, destination, origin.value)
        elif isinstance(origin, _Computed):
            self.refuse(target, origin.why, origin.sources)
        elif destination.dtype != live.dtype or overlaps_itself(view):
            why = "it is written through a view of another type or of overlapping elements"
            self.refuse(target, why, self._named_by(source))
        elif self._dtype(source) != source.dtype:
            self.refuse(target, f"bits of {self._dtype(source)} are read as {source.dtype}", self._named_by(source))
        elif source.dtype != destination.dtype and self._was_cast(source):
            self.refuse(target, f"it is cast to {source.dtype} on its way", self._named_by(source))
        elif (found := self._in_source(source.expand(destination.size()))) is not None:
            index, offset, strides = found
            self._record_view(target, destination, self._names[index], offset, strides)
        else:
            self._record_elements(target, destination, source.expand(destination.size()))

    def _record_view(
        self, target: str, destination: torch.Tensor, name: str, offset: int, strides: Sequence[int]
    ) -> None:
        dimensions = list(zip(destination.size(), strides, destination.stride(), strict=True))
        repeats = math.prod(length for length, step, _ in dimensions if step == 0)
        taken = tuple(step for _, step, _ in dimensions if step), tuple(n for n, step, _ in dimensions if step)
        if repeats > _MOST_PIECES or overlaps_itself((0, *taken)):
            self.refuse(target, f"elements of {name} are repeated in it", [name])
            return
        for start, rest in repeated_parts(_offset(destination), dimensions):
            self._slices.append(make_slice(name, offset, target, start, rest))

    def _record_elements(self, target: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        with _disable_current_modes():
            ids = self._ids(source).flatten()
            places = _positions(destination.size(), destination.stride(), _offset(destination)).flatten()
            order = places.argsort()
            ids, places = ids[order], places[order]
            if bool((ids < 0).any()):
                why = "part of it is filled with something that is not the checkpoint's"
                self.refuse(target, why, self._named_by(source))
                return
            for index in _distinct(ids >> _ELEMENT_BITS):
                name = self._names[index]
                mine = ids >> _ELEMENT_BITS == index
                runs = strided_runs(places[mine], ids[mine] & _ELEMENT, _MOST_PIECES)
                if runs is None:
                    self.refuse(target, f"elements of {name} are scattered over it", self._named_by(source))
                    return
                self._slices += [make_slice(name, start, target, offset, parts) for start, offset, parts in runs]

    def _write(self, func: Any, args: tuple[Any, ...], known: list[torch.Tensor]) -> Any:
        """An operator that changes something in place."""
        name = _operator(func)
        changed = args[0] if args and isinstance(args[0], torch.Tensor) else None
        target = None if changed is None else self._targets.get(_storage(changed))
        if changed is not None and target is not None:
            if name in _FILLS and not known and changed.dtype == self._live[target].dtype:
                self._record_constant(target, changed, _filled_with(args))
            else:
                self.refuse(target, f"it is changed in place ({name})", self._named_by(*known))
            self._written.add(target)
            return changed
        others = [
            self._targets[_storage(item)] for value in args for item in _tensors(value) if _is_in(item, self._targets)
        ]
        sources = self._named_by(*known)
        for other in others:
            self.refuse(other, f"it is used by {name}, which is not followed", sources)
        computed = _Computed(f"its values are transformed ({name})", sources)
        if (
            name in _FILLS
            and changed is not None
            and all(item is changed for item in known)
            and changed.numel() == _stored(changed)
        ):
            computed = _Filled(computed.why, sources, _filled_with(args))
        for tensor in known if changed is None else [changed]:
            self._note(tensor, computed)
        return changed

    def _record_constant(self, target: str, written: torch.Tensor, value: float) -> None:
        view = (_offset(written), tuple(written.stride()), tuple(written.size()))
        self._constants.append((len(self._slices), Constant(target, *view, value)))

    def _judge_constants(self) -> None:
        """Keep the constants that loading leaves in place: those that no copy covers, and none that covers a copy."""
        kept: list[tuple[int, Constant]] = []
        for before, constant in self._constants:
            block = (constant.offset, constant.strides, constant.shape)
            pieces = [(at, piece) for at, piece in enumerate(self._slices) if piece.target == constant.target]
            cover = Cover([block, *(target_block(piece) for _, piece in pieces)])
            for at, piece in pieces:
                if at < before:
                    cover.add(target_block(piece))
            if bool(cover.view(block).any()):
                self.refuse(constant.target, "it is filled with a constant after it was loaded")
                continue
            for at, piece in pieces:
                if at >= before:
                    cover.add(target_block(piece))
            if not bool(cover.view(block).all()):
                kept.append((before, constant))
        self._constants = kept

    def _named_by(self, *tensors: torch.Tensor) -> frozenset[str]:
        """The checkpoint tensors that `tensors` hold elements of, or were computed from."""
        names: set[str] = set()
        for tensor in tensors:
            origin = self._origins.get(_storage(tensor))
            if isinstance(origin, _Whole | _Arranged):
                names.add(self._names[origin.index])
            elif isinstance(origin, _Moved):
                indices = _distinct(origin.ids[origin.ids >= 0] >> _ELEMENT_BITS)
                names |= {self._names[index] for index in indices}
            elif origin is not None:
                names |= origin.sources
        return frozenset(names)

    def _note(self, tensor: torch.Tensor, origin: _Origin) -> None:
        self._origins[_storage(tensor)] = origin
        self._alive.append(tensor)  # A storage that is freed could come back as another.


def _distinct(numbers: torch.Tensor) -> list[int]:
    values: list[int] = numbers.unique().tolist()  # type: ignore[no-untyped-call]
    return values


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_in(tensor: torch.Tensor, storages: Mapping[int, object]) -> bool:
    return _storage(tensor) in storages


def _stored(tensor: torch.Tensor) -> int:
    """Elements of its type that the storage of `tensor` has."""
    return int(tensor.untyped_storage().nbytes()) // tensor.dtype.itemsize


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _filled_with(args: tuple[Any, ...]) -> float:
    value = args[1] if len(args) > 1 else 0.0
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def _operator(func: Any) -> str:
    return str(func._schema.name).split("::")[1]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, list | tuple) else []


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    return [_mapped(item, change) for item in value] if isinstance(value, list | tuple) else value


def _positions(size: Iterable[int], stride: Iterable[int], first: int) -> torch.Tensor:
    """The storage position of every element of a view, in its shape, plus `first`."""
    size = tuple(size)
    places = torch.full((), first, dtype=torch.int64)
    for at, (length, step) in enumerate(zip(size, stride, strict=True)):
        shape = [length if other == at else 1 for other in range(len(size))]
        places = places + (torch.arange(length) * step).reshape(shape)
    return places.expand(size)
