"""The receiver's side of a quantised version: what it stands for, tensor by tensor, for a model in another type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from weightlane.ckpt_engines import ManifestError

from .codecs.quantised import DTYPES, QUANTISERS, Scheme
from .coverage import Expectation
from .manifest import Manifest
from .quantisation import QuantisedPair, checked_scheme, quantised_pairs
from .sliced import SlicedTensors
from .tensor_spec import TensorSpec


class RestoredTensors(Mapping[str, torch.Tensor]):
    """The tensors of a quantised version as they were before, as far as quantising leaves it: each is made when it is asked for.

    Args:
        staged: The tensors as they came, scales included.
        pairs: The matrices among them.
        dtypes: In which type each matrix is wanted: its float32 values, rounded.
    """

    def __init__(
        self,
        staged: Mapping[str, torch.Tensor],
        pairs: Mapping[str, QuantisedPair],
        dtypes: Mapping[str, torch.dtype],
        scheme: Scheme,
    ) -> None:
        scales = {pair.scales.name for pair in pairs.values()}
        self._staged = staged
        self._kinds = without_data(staged)
        self._pairs = pairs
        self._dtypes = dtypes
        self._scheme = scheme
        self._names = [name for name in staged if name not in scales]

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        staged, pair = self._staged[name], self._pairs.get(name)
        if pair is None:
            return staged
        out = torch.empty(staged.shape, dtype=self._dtypes[name], device=staged.device)
        scales = self._staged[pair.scales.name]
        return QUANTISERS[self._scheme].dequantise(staged, scales, out=out)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def without_data(self, name: str) -> torch.Tensor:
        """What `name` gives, on the meta device."""
        staged = self._kinds[name]
        return torch.empty(staged.shape, dtype=self._dtypes.get(name, staged.dtype), device="meta")


def without_data(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors with the shapes and types of `tensors`, without making any of those that are made when asked for."""
    if isinstance(tensors, RestoredTensors | SlicedTensors):
        return {name: tensors.without_data(name) for name in tensors}
    return dict(tensors)


def one_by_one(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether each tensor takes memory of its own once it is asked for."""
    return isinstance(tensors, RestoredTensors | SlicedTensors)


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
        self._scheme: Scheme = "fp8"
        self._pairs: dict[str, QuantisedPair] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self.specs = tensors
        """What the version consists of once it is restored."""
        if not manifest.quantised:
            return
        self._scheme = scheme = checked_scheme(manifest.quantised)
        pairs = quantised_pairs(tensors, scheme)
        if any(pair.scales.name in expectation.tensors for pair in pairs.values()):
            return  # the model itself is quantised
        self._pairs = pairs
        self._dtypes = {name: _wanted(name, expectation, scheme) for name in pairs}
        scales = {pair.scales.name for pair in pairs.values()}
        self.specs = tuple(
            TensorSpec(spec.name, spec.shape, self._dtypes.get(spec.name, spec.dtype))
            for spec in tensors
            if spec.name not in scales
        )

    def __call__(self, staged: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors to load, of those that are staged."""
        return RestoredTensors(staged, self._pairs, self._dtypes, self._scheme) if self._pairs else staged

    @property
    def restores(self) -> bool:
        """Whether anything is restored."""
        return bool(self._pairs)


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
