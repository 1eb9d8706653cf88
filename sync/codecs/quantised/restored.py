"""The receiver's side of a quantised version, which is restored slice by slice for a model in another dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from weightlane.ckpt_engines import ManifestError

from ...version.box import Box
from ...version.expectation import Expectation
from ...version.manifest import Manifest
from ...version.sliced_tensors import LazyTensors, SlicedTensors, Slicing
from ...version.tensor_spec import TensorSlice, TensorSpec
from . import block_fp8
from .quantisation import QuantisedPair, quantised_pairs, touched_blocks


class RestorePlan:
    """How a receiver loads versions like that of a manifest: as they were sent, or restored.

    Raises:
        ManifestError: The version's tensors do not fit each other.
    """

    def __init__(self, manifest: Manifest, expectation: Expectation) -> None:
        self.pairs: dict[str, QuantisedPair] = {}
        """The matrices that are restored, by name."""
        self.specs = manifest.tensors
        """The tensors of the version once it is restored."""
        self.regions: dict[str, TensorSlice] = {}
        """Slices of restored tensors, by their names in the stream."""
        self.restored: dict[str, TensorSpec] = {}
        """Shape and dtype of each of them."""
        self.scales: dict[str, list[tuple[Box, str]]] = defaultdict(list)
        """Slices of each tensor of scales, with their names in the stream."""
        self._manifest = manifest
        self._slicing: Slicing | None = None
        """The slices of restored tensors, if some are not whole."""
        if manifest.quantised:
            self._prepare(manifest, expectation)

    def _prepare(self, manifest: Manifest, expectation: Expectation) -> None:
        pairs = quantised_pairs(manifest.tensors)
        if any(pair.scales.name in expectation.tensors for pair in pairs.values()):
            return  # the model itself is quantised
        self.pairs = pairs
        scales = {pair.scales.name for pair in pairs.values()}
        own = expectation.own_names([spec.name for spec in manifest.tensors if spec.name not in scales])
        dtypes = {name: _wanted_dtype(own.get(name, name), expectation) for name in pairs}
        self.specs = tuple(
            TensorSpec(spec.name, spec.shape, dtypes.get(spec.name, spec.dtype))
            for spec in manifest.tensors
            if spec.name not in scales
        )
        restored = {spec.name: spec for spec in self.specs}
        regions = {spec.name: region for spec, region in zip(manifest.specs, manifest.regions, strict=True)}
        for name in manifest.whole_order or regions:
            tensor, box = regions[name].spec.name, regions[name].box
            if tensor in scales:
                self.scales[tensor].append((box, name))
            else:
                self.regions[name] = TensorSlice(restored[tensor], box)
                self.restored[name] = TensorSpec(name, box.shape, restored[tensor].dtype)
        if manifest.slicing is not None and not manifest.whole_order:
            self._slicing = Slicing(manifest.plan, self.specs, tuple(self.regions.values()))

    def __call__(self, staged: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors to load; `staged` are the tensors of the stream."""
        if not self.pairs:
            return self._manifest.loaded(staged)
        restored = RestoredTensors(self, staged)
        return restored if self._slicing is None else SlicedTensors(self._slicing, restored)

    @property
    def restores(self) -> bool:
        """Whether a matrix is restored."""
        return bool(self.pairs)


class RestoredTensors(LazyTensors):
    """The slices of a quantised version, each restored when it is read."""

    def __init__(self, plan: RestorePlan, staged: Mapping[str, torch.Tensor]) -> None:
        self._plan = plan
        self._staged = staged
        self._listed = plan.restored

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        region, staged = self._plan.regions[name], self._staged[name]
        pair = self._plan.pairs.get(region.spec.name)
        if pair is None:
            return staged
        out = torch.empty(staged.shape, dtype=region.spec.dtype, device=staged.device)
        scales = self._scales(pair, touched_blocks(region.box), staged.device)
        return block_fp8.dequantise(staged, scales, at=region.box.starts, out=out)

    def _scales(self, pair: QuantisedPair, blocks: Box, device: torch.device) -> torch.Tensor:
        """The scales of `blocks`. Scales that did not arrive, because nothing here needs their elements, are NaN."""
        scales = torch.full(blocks.shape, float("nan"), dtype=torch.float32, device=device)
        for box, name in self._plan.scales[pair.scales.name]:
            if (common := box.intersect(blocks)) is not None:
                scales[common.within(blocks).index] = self._staged[name][common.within(box).index]
        return scales


def are_restored(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether `tensors` are restored from a quantised version."""
    return isinstance(tensors.staged if isinstance(tensors, SlicedTensors) else tensors, RestoredTensors)


def _wanted_dtype(name: str, expectation: Expectation) -> torch.dtype:
    """The dtype in which the receiver loads a matrix."""
    expected = expectation.tensors.get(expectation.tied.get(name, name))
    if expected is None:  # refused later as unexpected
        return block_fp8.DTYPE
    floats = [dtype for dtype in expected.dtypes if dtype.is_floating_point and dtype.itemsize > 1]
    if expectation.dtype in floats:
        return expectation.dtype
    if len(floats) == 1:
        return floats[0]
    raise ManifestError(
        f"{name} was sent quantised, and the dtype to restore it to is not known.",
        part="quantisation",
        hint="Give the Expectation its dtype.",
    )
