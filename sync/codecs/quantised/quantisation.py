"""The quantised tensors of a version: which tensors are quantised, and the names, shapes and slices that they become.

A matrix ``a.b.weight`` of a linear layer becomes two tensors of the stream: its elements under the same name, and its scales
(`weightlane.sync.codecs.quantised`). All other tensors stay unquantised: embeddings and the head, norms and biases, and the
routers of mixtures of experts. The quantised checkpoints that inference engines load are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError, ManifestError

from ...version.box import Box, overlay
from ...version.placement import Placement
from ...version.tensor_spec import TensorSpec, dtype_name
from .block_fp8 import BLOCK, DTYPE

FP8 = "fp8"
"""Value of `sync.quantise`, and `Manifest.quantised`, of versions in this format."""

_PART = "quantisation"
_WEIGHT = ".weight"
_MATRIX = 2
_KEPT = frozenset(
    {
        *("lm_head", "embed_out", "output", "score", "classifier"),
        *("wte", "wpe", "tok_embeddings", "word_embeddings", "embed_in", "shared"),
        *("gate", "router", "shared_expert_gate"),
    }
)
"""Hugging Face's names of modules whose matrix is not quantised: heads, embeddings and routers."""


def scale_name(weight: str) -> str:
    """Name of the scales: ``a.b.weight`` -> ``a.b.weight_scale_inv``."""
    return f"{weight}_scale_inv"


def scale_shape(weight: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a matrix of shape `weight`."""
    rows, columns = weight
    return -(-rows // BLOCK), -(-columns // BLOCK)


def quantization_config(not_quantised: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a ``config.json``.

    Args:
        not_quantised: Names of linear modules that stay as they are, e.g. ``["lm_head"]``. Activations are quantised dynamically
            in the same format as weights.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": not_quantised,
    }


@dataclass(frozen=True, slots=True)
class QuantisedPair:
    """A quantised matrix on the wire."""

    weight: TensorSpec
    """The elements."""
    scales: TensorSpec
    """The scales, float32, one for each block of 128 x 128."""


def is_quantised(spec: TensorSpec) -> bool:
    """Whether a tensor of the checkpoint is quantised when a version is."""
    module = spec.name.removesuffix(_WEIGHT).rpartition(".")[2]
    return (
        spec.name.endswith(_WEIGHT)
        and len(spec.shape) == _MATRIX
        and spec.numel > 0
        and spec.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and module not in _KEPT
        and "embed" not in module
    )


def pair_of(spec: TensorSpec) -> QuantisedPair:
    """The elements and scales that a matrix becomes."""
    rows, columns = spec.shape
    return QuantisedPair(
        TensorSpec(spec.name, spec.shape, DTYPE),
        TensorSpec(scale_name(spec.name), scale_shape((rows, columns)), torch.float32),
    )


def quantised_shares(shares: Mapping[str, Placement]) -> dict[str, Placement]:
    """The slices of a quantised version that each rank sends instead of its share. Raises `ConfigError` if none is quantised."""
    quantised = {name: quantised_placement(share) for name, share in shares.items()}
    if not any(spec.dtype == DTYPE for share in quantised.values() for spec in share.specs):
        raise ConfigError(
            "no tensor of this checkpoint is the matrix of a linear layer.",
            part=_PART,
            hint='Set sync.quantise to "none".',
        )
    return quantised


def quantised_placement(held: Placement) -> Placement:
    """The slices of a quantised version that a rank sends instead of `held`. For the scales see `scale_box`."""

    def wire() -> Iterator[tuple[TensorSpec, Iterable[Box]]]:
        for spec, boxes in zip(held.specs, held.boxes, strict=True):
            if not is_quantised(spec):
                yield spec, boxes
                continue
            pair = pair_of(spec)
            yield pair.weight, boxes
            yield pair.scales, map(scale_box, boxes)

    return Placement.of_boxes(wire())


def scale_box(box: Box) -> Box:
    """The scales that belong to the sender of `box` of a matrix: those of the blocks whose first element is in `box`."""
    return _blocks(box.starts, box.stops)


def touched_blocks(box: Box) -> Box:
    """The scales of all elements of `box` of a matrix: those of the blocks that `box` touches."""
    starts = tuple(start // BLOCK * BLOCK for start in box.starts)
    return _blocks(starts, box.stops if box.numel else starts)


def _blocks(starts: tuple[int, ...], stops: tuple[int, ...]) -> Box:
    """The blocks whose first element lies between `starts` and `stops`."""
    firsts, lasts = (tuple(-(-at // BLOCK) for at in edge) for edge in (starts, stops))
    return Box(firsts, tuple(last - first for first, last in zip(firsts, lasts, strict=True)))


def quantised_pairs(specs: Iterable[TensorSpec]) -> dict[str, QuantisedPair]:
    """The quantised matrices among the tensors of a version, by name.

    Raises:
        ManifestError: The scales of a matrix are missing or do not fit, or scales have no matrix.
    """
    by_name: Mapping[str, TensorSpec] = {spec.name: spec for spec in specs}
    pairs: dict[str, QuantisedPair] = {}
    for name, spec in by_name.items():
        if spec.dtype != DTYPE or not name.endswith(_WEIGHT):
            continue
        scales = by_name.get(scale_name(name))
        if len(spec.shape) != _MATRIX:
            raise _unfit(f"{name} is quantised and has shape {list(spec.shape)}, so it is no matrix")
        if scales is None:
            raise _unfit(f"{name} is quantised and its scales {scale_name(name)} are missing")
        wanted = pair_of(spec).scales
        if scales != wanted:
            raise _unfit(
                f"{scales.name} is {dtype_name(scales.dtype)} of shape {list(scales.shape)},"
                f" {name} of shape {list(spec.shape)} needs float32 of {list(wanted.shape)}"
            )
        pairs[name] = QuantisedPair(spec, scales)
    suffix = scale_name(_WEIGHT)
    for name in by_name:
        if name.endswith(suffix) and name.removesuffix(suffix) + _WEIGHT not in pairs:
            raise _unfit(f"{name} has no matrix in {dtype_name(DTYPE)} to scale")
    return pairs


def _unfit(what: str) -> ManifestError:
    return ManifestError(f"{what}.", part=_PART, hint="Run one release of weightlane on both sides.")


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
