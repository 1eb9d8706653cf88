"""The receiver's side of a delta: decoded while it arrives, proven valid, and ready to be put into what it applies to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from weightlane.ckpt_engines import ProtocolError

from ...version.box import Box
from ...version.manifest import CODEC_DENSE, DeltaSegment, Manifest
from ...version.tensor_spec import TensorSlice
from .format import Patch, decode


class IncomingDelta:
    """A delta of which the beginning has arrived: decoded segment by segment, each as soon as it is there.

    Args:
        manifest: What is to come.
        next_bucket: The next piece of what crosses the wire, 1-D uint8 of any length, once it is there and verified; raises why
            there is none.
    """

    def __init__(self, manifest: Manifest, next_bucket: Callable[[], torch.Tensor]) -> None:
        self.manifest = manifest
        self.patches = self._decoded(next_bucket)
        """By segment, once; none for a segment without a change. Raises `ProtocolError` at what is not a delta of its segment."""

    @property
    def version(self) -> int:
        """The version it leads to."""
        return self.manifest.version

    def _decoded(self, next_bucket: Callable[[], torch.Tensor]) -> Iterator[tuple[DeltaSegment, Patch]]:
        left = torch.empty(0, dtype=torch.uint8)
        for segment in self.manifest.segments:
            spec = self.manifest.specs[segment.tensor]
            pieces, missing = [left], segment.nbytes - left.numel()
            while missing > 0:
                pieces.append(next_bucket().cpu())
                missing -= pieces[-1].numel()
            data = torch.cat(pieces) if len(pieces) > 1 else left
            left, data = data[segment.nbytes :], data[: segment.nbytes]
            try:
                patch = decode(data, elements=segment.numel, itemsize=spec.dtype.itemsize)
            except ProtocolError as error:
                raise ProtocolError(f"the delta of {spec.name}: {error.message}", part=error.part) from error
            if patch.carried:
                yield segment, patch

    def where(self, segment: DeltaSegment) -> TensorSlice:
        """Which elements of which tensor of the checkpoint a segment is of."""
        region = self.manifest.regions[segment.tensor]
        return TensorSlice(region.spec, segment.box.inside(region.box))


@dataclass(frozen=True, slots=True)
class StagedDelta:
    """What turns one version into another, tensor by tensor."""

    manifest: Manifest
    patches: tuple[tuple[DeltaSegment, Patch], ...]
    """By segment; none for a segment without a change."""

    @classmethod
    def of(cls, delta: IncomingDelta) -> StagedDelta:
        """All of `delta`, once it has arrived. Raises what `IncomingDelta.patches` raises."""
        return cls(delta.manifest, tuple(delta.patches))

    @property
    def version(self) -> int:
        """The version it leads to."""
        return self.manifest.version

    @property
    def nbytes(self) -> int:
        """Memory it holds, in bytes."""
        return sum(patch.nbytes for _, patch in self.patches)

    @property
    def as_dense(self) -> Manifest:
        """The manifest of the version it leads to, as if it had been sent in full."""
        return replace(self.manifest, codec=CODEC_DENSE, base_version=None, base_identity="", segments=())

    def to(self, device: torch.device) -> StagedDelta:
        """The same on the device of what it is to be put into."""
        return replace(self, patches=tuple((segment, patch.to(device)) for segment, patch in self.patches))

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Exchange the changed elements of `tensors` with those held here.

        That turns the base into the version; doing it again restores the base.

        Args:
            tensors: Those of the checkpoint by name, contiguous, on this device.
        """
        for segment, patch in self.patches:
            region = self.manifest.regions[segment.tensor]
            _swap(patch, tensors[region.spec.name], segment.box.inside(region.box))

    def swap_staged(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """As `swap`, for the tensors of the stream."""
        for segment, patch in self.patches:
            _swap(patch, tensors[self.manifest.specs[segment.tensor].name], segment.box)


def _swap(patch: Patch, tensor: torch.Tensor, box: Box) -> None:
    """Exchange what is in `patch` with the slice `box` of `tensor`."""
    rows = box.rows(tuple(tensor.shape))
    if rows is not None and rows[2] == 1:
        patch.swap_(tensor.view(-1)[rows[0] : rows[0] + rows[1]])
        return
    part = tensor[box.index]
    packed = part.contiguous()
    patch.swap_(packed)
    part.copy_(packed)
