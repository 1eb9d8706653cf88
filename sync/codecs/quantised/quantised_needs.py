"""The slices of a quantised version that a rollout rank needs to restore it: elements and their scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...version.box import Box, overlay
from ...version.placement import Placement
from ...version.tensor_spec import TensorSpec
from .quantisation import QuantisedPair, quantised_pairs, touched_blocks


def needed_on_the_wire(needed: Placement, sent: Sequence[TensorSpec]) -> Placement | None:
    """Translate `needed` from restored tensors to the tensors `sent` on the wire. Returns None if `needed` has other tensors.

    Raises:
        ManifestError: `sent` is no quantised version.
    """
    pairs = quantised_pairs(sent)
    scales = {pair.scales.name for pair in pairs.values()}
    wire = {spec.name: spec for spec in sent if spec.name not in scales}
    if wire.keys() != {spec.name for spec in needed.specs}:
        return None
    if not all(
        _stands_for(wire[spec.name], spec, restored=spec.name in pairs) or not boxes
        for spec, boxes in zip(needed.specs, needed.boxes, strict=True)
    ):
        return None

    def slices() -> Iterator[tuple[TensorSpec, Iterable[Box]]]:
        for spec, boxes in zip(needed.specs, needed.boxes, strict=True):
            yield wire[spec.name], boxes
            if (pair := pairs.get(spec.name)) is not None:
                yield pair.scales, _scales_of(pair, boxes)

    return Placement.of_boxes(slices())


def _stands_for(wire: TensorSpec, spec: TensorSpec, *, restored: bool) -> bool:
    return wire.shape == spec.shape and spec.dtype.is_floating_point if restored else wire.stands_for(spec)


def _scales_of(pair: QuantisedPair, boxes: Sequence[Box]) -> list[Box]:
    """The scales of all elements of `boxes`, in slices that do not overlap."""
    touched = [(touched_blocks(box), 0) for box in boxes]
    return [box for box, labels in overlay(touched, pair.scales.shape) if labels]
