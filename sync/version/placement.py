"""Placements: the slices of checkpoint tensors that a trainer rank holds or a rollout rank needs. Plain data, no weights."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from weightlane.ckpt_engines import ProtocolError

from .box import Box
from .tensor_spec import LocalShard, TensorSpec, dtype_of, place_of, renamed

_PART = "placement"
_MOST_SLICES = 1 << 16
"""Limit for the slices of one tensor on one rank. Every parallel layout stays far below it; a damaged message may not."""


@dataclass(frozen=True)
class Placement:
    """The slices of tensors that one rank holds, or needs.

    Attributes:
        specs: The tensors, each once.
        boxes: The slices of each of `specs`; they do not overlap.
    """

    specs: tuple[TensorSpec, ...]
    boxes: tuple[tuple[Box, ...], ...]

    @classmethod
    def of(cls, slices: Iterable[tuple[TensorSpec, Box]]) -> Placement:
        """The placement with these slices, in any order. A slice without elements only adds its tensor."""
        found: dict[str, tuple[TensorSpec, list[Box]]] = {}
        for spec, box in slices:
            found.setdefault(spec.name, (spec, []))[1].append(box)
        return cls.of_boxes(found.values())

    @classmethod
    def of_boxes(cls, boxes: Iterable[tuple[TensorSpec, Iterable[Box]]]) -> Placement:
        """The placement with these slices of each tensor; a tensor may have none."""
        listed = [(spec, tuple(box for box in each if box.numel)) for spec, each in boxes]
        return cls(tuple(spec for spec, _ in listed), tuple(each for _, each in listed))

    @classmethod
    def of_shards(cls, shards: Sequence[LocalShard]) -> Placement:
        """The placement of a trainer rank with these shards."""
        return cls.of((shard.spec, shard.box) for shard in without_aliases(shards))

    @classmethod
    def whole(cls, specs: Iterable[TensorSpec]) -> Placement:
        """The placement of a rank that holds or needs every tensor in full."""
        return cls.of((spec, Box.whole(spec.shape)) for spec in specs)

    def named_as(self, sent: Collection[str]) -> Placement:
        """Rename the tensors to the names that are `sent`. Tensors that are neither sent nor needed are left out."""
        if {spec.name for spec in self.specs} == set(sent):
            return self
        named = {own: name for name, own in renamed(sent, [spec.name for spec in self.specs]).items()}
        kept = [
            (replace(spec, name=named.get(spec.name, spec.name)), boxes)
            for spec, boxes in zip(self.specs, self.boxes, strict=True)
            if boxes or spec.name in sent or spec.name in named
        ]
        return Placement(tuple(spec for spec, _ in kept), tuple(boxes for _, boxes in kept))

    @property
    def slices(self) -> Iterator[tuple[TensorSpec, Box]]:
        """Every slice with its tensor."""
        return ((spec, box) for spec, boxes in zip(self.specs, self.boxes, strict=True) for box in boxes)

    @property
    def nbytes(self) -> int:
        """Size on the wire in bytes."""
        return sum(spec.dtype.itemsize * box.numel for spec, box in self.slices)

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits, equal for two ranks with the same slices in the same order."""
        return hashlib.sha256(json.dumps(self.to_plain()).encode()).hexdigest()[:16]

    def to_plain(self) -> list[Any]:
        """The placement as JSON: ``[[name, shape, dtype, [[starts, shape], ...]], ...]``."""
        return [
            [*spec.to_plain(), [box.to_plain() for box in boxes]]
            for spec, boxes in zip(self.specs, self.boxes, strict=True)
        ]

    @classmethod
    def from_plain(cls, plain: Any) -> Placement:
        """Parse a peer's message; raises `ProtocolError` for anything that is no placement."""
        if not isinstance(plain, list):
            raise ProtocolError("not a placement.", part=_PART)
        specs, boxes = [], []
        for entry in plain:
            match entry:
                case [str() as name, [*shape], str() as dtype, [*slices]]:
                    if len(slices) > _MOST_SLICES:
                        raise ProtocolError(
                            f"{name[:100]} has {len(slices)} slices, more than {_MOST_SLICES}.", part=_PART
                        )
                    whole = Box.from_plain([[0] * len(shape), shape])
                    specs.append(TensorSpec(name, whole.shape, dtype_of(dtype)))
                    boxes.append(tuple(Box.from_plain(each) for each in slices))
                case _:
                    raise ProtocolError(f"not a tensor of a placement: {str(entry)[:100]}.", part=_PART)
            if wrong := [box for box in boxes[-1] if not box.fits(whole.shape)]:
                raise ProtocolError(f"{name} of shape {list(whole.shape)} has no slice {wrong[0]}.", part=_PART)
        if len({spec.name for spec in specs}) != len(specs):
            raise ProtocolError("a tensor is listed twice.", part=_PART)
        return cls(tuple(specs), tuple(boxes))


def without_aliases(shards: Sequence[LocalShard]) -> list[LocalShard]:
    """Leave out `aliases`. A tensor that is still sent under such a name has its own values, and a receiver can refuse it."""
    left_out = aliases(shards)
    return [shard for shard in shards if shard.spec.name not in left_out]


def aliases(shards: Sequence[LocalShard]) -> dict[str, str]:
    """The tensors whose shards all share memory with those of another one, such as a tied output embedding, with its name."""
    places: dict[str, list[tuple[object, ...]]] = defaultdict(list)
    for shard in shards:
        if shard.numel:
            places[shard.spec.name].append((place_of(shard.data), shard.starts, shard.spec.shape, shard.spec.dtype))
    first: dict[tuple[tuple[object, ...], ...], str] = {}
    for name in sorted(places, key=_is_head):  # the embedding's name is the one to keep
        first.setdefault(tuple(places[name]), name)
    return {name: kept for name, where in places.items() if (kept := first[tuple(where)]) != name}


def _is_head(name: str) -> bool:
    return name.endswith("lm_head.weight")
