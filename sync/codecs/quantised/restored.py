"""The receiver's side of a quantised version: what it stands for, slice by slice, for a model in another type."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch

from weightlane.ckpt_engines import ManifestError

from ...version.box import Box
from ...version.expectation import Expectation
from ...version.manifest import Manifest, Slicing
from ...version.sliced_tensors import LazyTensors, SlicedTensors
from ...version.tensor_spec import TensorSlice, TensorSpec
from .checkpoint import DTYPES, Scheme
from .quantisation import QuantisedPair, checked_scheme, quantised_pairs, touched_blocks
from .quantiser import QUANTISERS


class Restoring:
    """How a receiver takes the versions of a manifest: as they come, or restored.

    Args:
        manifest: Of a version.
        expectation: What the receiver's model is made of.

    Raises:
        ManifestError: Its quantisation is not known here, or its tensors do not fit each other.
    """

    def __init__(self, manifest: Manifest, expectation: Expectation) -> None:
        tensors = manifest.tensors
        self.scheme: Scheme = "fp8"
        """As what matrices were quantised, if any are restored."""
        self.pairs: dict[str, QuantisedPair] = {}
        """The matrices that are restored, by name."""
        self.specs = tensors
        """What the version consists of once it is restored."""
        self.regions: dict[str, TensorSlice] = {}
        """Which slices of restored tensors come, by the names under which they come."""
        self.scales: dict[str, list[tuple[Box, str]]] = defaultdict(list)
        """Which slices of which scales come, with their names."""
        self._slicing = manifest.slicing
        self._order = [spec.name for spec in tensors]
        """Of a version that goes by a transfer plan, and of which every tensor comes whole; empty otherwise."""
        if manifest.slicing is None or {spec.name for spec in manifest.specs} != set(self._order):
            self._order = []
        if manifest.quantised:
            self._prepare(manifest, expectation)

    def _prepare(self, manifest: Manifest, expectation: Expectation) -> None:
        scheme = checked_scheme(manifest.quantised)
        pairs = quantised_pairs(manifest.tensors, scheme)
        if any(pair.scales.name in expectation.tensors for pair in pairs.values()):
            return  # the model itself is quantised
        self.scheme, self.pairs = scheme, pairs
        dtypes = {name: _wanted(name, expectation, scheme) for name in pairs}
        scales = {pair.scales.name for pair in pairs.values()}
        self.specs = tuple(
            TensorSpec(spec.name, spec.shape, dtypes.get(spec.name, spec.dtype))
            for spec in manifest.tensors
            if spec.name not in scales
        )
        restored = {spec.name: spec for spec in self.specs}
        regions = {spec.name: region for spec, region in zip(manifest.specs, manifest.regions, strict=True)}
        for name in self._order or regions:
            tensor, box = regions[name].spec.name, regions[name].box
            if tensor in scales:
                self.scales[tensor].append((box, name))
            else:
                self.regions[name] = TensorSlice(restored[tensor], box)
        if self._slicing is not None:
            self._slicing = Slicing(manifest.plan, self.specs, tuple(self.regions.values()))

    def __call__(self, staged: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors to load, of what is staged of the stream."""
        if self.pairs:
            staged = RestoredTensors(self, staged)
        elif self._order:
            staged = {name: staged[name] for name in self._order}
        return staged if self._slicing is None or self._order else SlicedTensors(self._slicing, staged)

    @property
    def restores(self) -> bool:
        """Whether anything is restored."""
        return bool(self.pairs)


class RestoredTensors(LazyTensors):
    """What came of a quantised version as it was before, as far as quantising leaves it.

    Args:
        how: Which slices of what these are.
        staged: They as they came, scales included.
    """

    def __init__(self, how: Restoring, staged: Mapping[str, torch.Tensor]) -> None:
        self._how = how
        self._staged = staged

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        region, staged = self._how.regions[name], self._staged[name]
        pair = self._how.pairs.get(region.spec.name)
        if pair is None:
            return staged
        out = torch.empty(staged.shape, dtype=region.spec.dtype, device=staged.device)
        scales = self._scales(pair, touched_blocks(pair, region.box, self._how.scheme), staged.device)
        row, column = region.box.starts
        return QUANTISERS[self._how.scheme].dequantise(staged, scales, at=(row, column), out=out)

    def _scales(self, pair: QuantisedPair, blocks: Box, device: torch.device) -> torch.Tensor:
        """Of `blocks`. Where a slice has elements that nobody needs here, their scales may not have come: these are NaN."""
        scales = torch.full(blocks.shape, float("nan"), dtype=torch.float32, device=device)
        for box, name in self._how.scales[pair.scales.name]:
            if (common := box.intersect(blocks)) is not None:
                scales[common.within(blocks).index] = self._staged[name][common.within(box).index]
        return scales

    def __contains__(self, name: object) -> bool:
        return name in self._how.regions

    def __iter__(self) -> Iterator[str]:
        return iter(self._how.regions)

    def __len__(self) -> int:
        return len(self._how.regions)

    def without_data(self, name: str) -> torch.Tensor:
        """See `LazyTensors`."""
        region = self._how.regions[name]
        return torch.empty(region.box.shape, dtype=region.spec.dtype, device="meta")


def are_restored(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether `tensors` are of a quantised version, for a model in another type."""
    return isinstance(tensors.staged if isinstance(tensors, SlicedTensors) else tensors, RestoredTensors)


def _wanted(name: str, expectation: Expectation, scheme: Scheme) -> torch.dtype:
    """In which type the receiver wants a matrix."""
    expected = expectation.tensors.get(expectation.tied.get(name, name))
    if expected is None:  # refused as unexpected
        return DTYPES[scheme]
    floats = [dtype for dtype in expected.dtypes if dtype.is_floating_point and dtype.itemsize > 1]
    if expectation.dtype in floats:
        return expectation.dtype
    if len(floats) == 1:
        return floats[0]
    raise ManifestError(
        f"{name} came quantised, and it is not known in which type it is wanted here.",
        part="quantisation",
        hint="Give the Expectation its dtype.",
    )
