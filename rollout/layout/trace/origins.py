"""`Origins`: follows, while a model loads, which checkpoint elements every tensor holds.

A view never changes a tensor's storage, so that the storage identifies the checkpoint tensor of a view, and its offset and
strides the elements. An operator that makes a new storage either only moves elements (clone, cat, index, ...) or computes
values. Moved elements are followed by doing the same to element numbers; computed values are only known by their sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..map.layout_map import SourceSpec

_aten = torch.ops.aten

_ELEMENT_BITS = 40
"""Bits of an element number that count within one tensor, enough for any tensor. The bits above number the tensor."""
_ELEMENT = (1 << _ELEMENT_BITS) - 1
_MOST_FOLLOWED = 1 << 29
"""Most elements of one temporary that are followed one by one: numbers of more would take over 4 GB."""

_MOVES = frozenset(
    {
        _aten.clone.default,
        _aten._to_copy.default,
        _aten.cat.default,
        _aten.stack.default,
        _aten.index_select.default,
        _aten.index.Tensor,
        _aten.gather.default,
        _aten.constant_pad_nd.default,
        _aten.repeat.default,
        _aten.flip.default,
        _aten.roll.default,
        _aten.repeat_interleave.self_int,
        _aten._unsafe_view.default,
        _aten.permute_copy.default,
    }
)
"""Operators whose results hold elements of their inputs and nothing else."""
_CLONES = frozenset({_aten.clone.default, _aten._to_copy.default})
"""Operators of `_MOVES` whose results have the shape of their input."""


@dataclass(frozen=True, slots=True)
class Arranged:
    """The origin of a dense storage that holds a view of a checkpoint tensor: all of it, or a transposed one, for example."""

    index: int
    offset: int
    """Element number of the storage's first element in the source."""
    dims: tuple[tuple[int, int, int], ...]
    """Stride in the storage, length, and stride in the source; largest stride in the storage first."""
    dtype: torch.dtype


@dataclass(slots=True)
class Moved:
    """The origin of a storage that holds checkpoint elements in another order."""

    ids: torch.Tensor
    """Number of the source and of its element for each element of the storage; -1 for elements without an origin."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Computed:
    """The origin of a storage that holds computed values."""

    why: str
    sources: frozenset[str] = frozenset()
    """The checkpoint tensors that the values were computed from."""


@dataclass(frozen=True, slots=True)
class Filled(Computed):
    """The origin of a checkpoint tensor that was filled with one number: loaders zero a bias that another rank adds."""

    value: float = 0.0


Origin = Arranged | Moved | Computed


class Origins:
    """The origins of all tensors that hold elements of the checkpoint tensors `specs`."""

    def __init__(self, specs: Mapping[str, SourceSpec]) -> None:
        self.specs = dict(specs)
        self._names = list(specs)
        self._indices = {name: index for index, name in enumerate(specs)}
        self._origins: dict[int, Origin] = {}
        self._alive: list[torch.Tensor] = []

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._origins

    def of(self, tensor: torch.Tensor) -> Origin | None:
        """The origin of `tensor`; None for a tensor without checkpoint elements."""
        return self._origins.get(storage_of(tensor))

    def note(self, tensor: torch.Tensor, origin: Origin) -> None:
        """Remember the origin of `tensor`."""
        self._origins[storage_of(tensor)] = origin
        self._alive.append(tensor)  # The storage of a freed tensor could be reused for another one.

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the origin of a storage that `tensor`, which is new, has reused."""
        self._origins.pop(storage_of(tensor), None)

    def fed(self, name: str) -> torch.Tensor:
        """A new tensor without data that stands for the checkpoint tensor `name`."""
        spec = self.specs[name]
        with _disable_current_modes():
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        self.note(tensor, Arranged(self._indices[name], 0, ((1, spec.numel, 1),), spec.dtype))
        return tensor

    def dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype in which the elements of `tensor` were made; a view may reinterpret their bits."""
        origin = self.of(tensor)
        return origin.dtype if isinstance(origin, Moved | Arranged) else tensor.dtype

    def was_cast(self, tensor: torch.Tensor) -> bool:
        """Whether the elements of `tensor` have another dtype than their checkpoint tensor."""
        return any(self.specs[name].dtype != self.dtype(tensor) for name in self.sources_of(tensor))

    def sources_of(self, *tensors: torch.Tensor) -> frozenset[str]:
        """The checkpoint tensors that `tensors` hold elements of, or were computed from."""
        names: set[str] = set()
        for tensor in tensors:
            origin = self.of(tensor)
            if isinstance(origin, Arranged):
                names.add(self._names[origin.index])
            elif isinstance(origin, Moved):
                names |= {self._names[index] for index in _distinct(origin.ids[origin.ids >= 0] >> _ELEMENT_BITS)}
            elif origin is not None:
                names |= origin.sources
        return frozenset(names)

    def view_of_source(self, tensor: torch.Tensor) -> tuple[str, int, tuple[int, ...]] | None:
        """The checkpoint tensor that `tensor` is a view of, with the view's offset and strides in it; None if it is no view."""
        origin = self.of(tensor)
        if not isinstance(origin, Arranged):
            return None
        offset, rest, room = origin.offset, offset_of(tensor), []
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
        return self._names[origin.index], offset, tuple(strides)

    def element_numbers(self, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor, torch.Tensor]] | None:
        """For each source of `tensor` its name, a mask over the elements, and the masked elements' numbers in the source.

        Returns None if an element has no origin. Masks and numbers are of `tensor`, flattened.
        """
        ids = self._ids(tensor).flatten()
        if bool((ids < 0).any()):
            return None
        tensors = ids >> _ELEMENT_BITS
        masks = ((index, tensors == index) for index in _distinct(tensors))
        return ((self._names[index], mask, ids[mask] & _ELEMENT) for index, mask in masks)

    def follow(self, func: Any, args: Any, kwargs: Mapping[str, Any], inputs: list[torch.Tensor], out: Any) -> None:
        """Note the origin of `out`, a new storage that `func` made of `inputs`, of which at least one has an origin."""
        known = [tensor for tensor in inputs if tensor in self]
        origins = [self.of(tensor) for tensor in known]
        why = next((origin.why for origin in origins if isinstance(origin, Computed)), None)
        if why is None and func not in _MOVES:
            why = f"its values are transformed ({operator_name(func)})"
        elif why is None and any(tensor.dtype != out.dtype and self.was_cast(tensor) for tensor in known):
            why = f"it is cast to {known[0].dtype} before it is copied"
        if why is not None:
            self.note(out, Computed(why, self.sources_of(*known)))
        else:
            self.note(out, self._arranged(func, args, out) or self._moved(func, args, kwargs, inputs, out))

    def follow_copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Note the origin of `destination`, a temporary that `source` was copied into."""
        origin, already = self.of(source), self.of(destination)
        if isinstance(already, Computed):
            return
        if isinstance(origin, Computed):
            self.note(destination, origin)
            return
        why = None
        if isinstance(already, Arranged):
            why = "it is overwritten while loading"
        elif origin is not None and self.dtype(source) != source.dtype:
            why = "its bits are read as another dtype (copy_)"
        elif origin is not None and source.dtype != destination.dtype:
            why = f"it is cast to {destination.dtype} before it is copied"
        if why is not None:
            self.note(destination, Computed(why, self.sources_of(source, destination)))
            return
        with _disable_current_modes():
            if already is None:
                already = Moved(torch.full((stored_elements(destination),), -1, dtype=torch.int64), destination.dtype)
                self.note(destination, already)
            assert isinstance(already, Moved), "the others have returned"
            target = already.ids.as_strided(destination.size(), destination.stride(), offset_of(destination))
            if origin is not None:
                target.copy_(self._ids(source).expand(destination.size()))
            else:
                target.fill_(-1)

    def _arranged(self, func: Any, args: Any, out: torch.Tensor) -> Arranged | None:
        """The origin of `out` if it is a copy of one view, which need not be followed element by element."""
        if func not in _CLONES or self.dtype(args[0]) != args[0].dtype:
            return None
        found = self.view_of_source(args[0])
        dims = sorted(zip(out.stride(), out.size(), strict=True), reverse=True)
        dense = all(stride == math.prod(length for _, length in dims[at + 1 :]) for at, (stride, _) in enumerate(dims))
        if found is None or not dense or stored_elements(out) != out.numel():
            return None
        name, offset, strides = found
        ordered = tuple(sorted(zip(out.stride(), out.size(), strides, strict=True), reverse=True))
        return Arranged(self._indices[name], offset, ordered, out.dtype)

    def _moved(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], out: torch.Tensor) -> Origin:
        """The origin of `out`, found by doing to element numbers what `func` does to elements."""
        known = [tensor for tensor in inputs if tensor in self]
        made = {self.dtype(tensor) for tensor in known}
        if len(made) > 1 or made != {tensor.dtype for tensor in known}:
            return Computed(f"its bits are read as another dtype ({operator_name(func)})", self.sources_of(*known))
        if stored_elements(out) > _MOST_FOLLOWED:
            why = f"it is rearranged ({operator_name(func)}) and too large to be followed"
            return Computed(why, self.sources_of(*inputs))
        with _disable_current_modes():
            if func in _CLONES:
                ids = self._ids(args[0])
            else:
                numbers = [_mapped(value, self._ids_or_itself) for value in args]
                if func is _aten.constant_pad_nd.default:
                    numbers[2:] = [-1]
                options = {key: value for key, value in kwargs.items() if key not in {"dtype", "device"}}
                ids = func(*numbers, **options)
            stored = torch.full((stored_elements(out),), -1, dtype=torch.int64)
            stored.as_strided(out.size(), out.stride(), offset_of(out)).copy_(ids)
        return Moved(stored, out.dtype)

    def _ids_or_itself(self, tensor: torch.Tensor) -> torch.Tensor:
        """The element numbers of `tensor`, or `tensor` if it has no origin, such as an index."""
        return self._ids(tensor) if tensor in self else tensor

    def _ids(self, tensor: torch.Tensor) -> torch.Tensor:
        origin = self.of(tensor)
        if isinstance(origin, Moved):
            return origin.ids.as_strided(tensor.size(), tensor.stride(), offset_of(tensor))
        assert isinstance(origin, Arranged), "computed values have no numbers"
        first = origin.index << _ELEMENT_BITS
        with _disable_current_modes():
            if (found := self.view_of_source(tensor)) is not None:
                _, offset, strides = found
                return storage_positions(tensor.size(), strides, first + offset)
            lengths, steps = ([dim[at] for dim in origin.dims] for at in (1, 2))
            stored = storage_positions(lengths, steps, first + origin.offset).contiguous().flatten()
            return stored.as_strided(tensor.size(), tensor.stride(), offset_of(tensor))


def storage_of(tensor: torch.Tensor) -> int:
    """A number that is the same for all views of one storage."""
    return int(tensor.untyped_storage()._cdata)


def offset_of(tensor: torch.Tensor) -> int:
    """The storage offset in elements, as a plain integer."""
    return int(tensor.storage_offset())


def stored_elements(tensor: torch.Tensor) -> int:
    """The number of elements of its dtype that the storage of `tensor` has."""
    return int(tensor.untyped_storage().nbytes()) // tensor.dtype.itemsize


def storage_positions(size: Iterable[int], stride: Iterable[int], first: int) -> torch.Tensor:
    """The storage position of every element of a view, int64 of shape `size`; `first` is that of its first element."""
    size = tuple(size)
    positions = torch.full((), first, dtype=torch.int64)
    for at, (length, step) in enumerate(zip(size, stride, strict=True)):
        shape = [length if other == at else 1 for other in range(len(size))]
        positions = positions + (torch.arange(length) * step).reshape(shape)
    return positions.expand(size)


def operator_name(func: Any) -> str:
    """The name of an operator without its namespace and overload."""
    return str(func._schema.name).split("::")[1]


def _distinct(numbers: torch.Tensor) -> list[int]:
    values: list[int] = numbers.unique().tolist()  # type: ignore[no-untyped-call]
    return values


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    return [_mapped(item, change) for item in value] if isinstance(value, list | tuple) else value
