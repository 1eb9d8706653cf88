"""The receiver's side of a delta: it is decoded while it arrives, and checked before it changes a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from weightlane.ckpt_engines import ProtocolError

from ...version.box import Box
from ...version.manifest import CODEC_DENSE, Manifest
from ...version.manifest_message import DeltaSegment
from ...version.tensor_spec import TensorSlice
from .format import Patch, decode


class IncomingDelta:
    """A delta that is still arriving. Each segment is decoded as soon as its bytes are there.

    Args:
        manifest: The manifest of the delta.
        next_bucket: Waits for the next bytes of the segments: verified, 1-D uint8 of any length.
    """

    def __init__(self, manifest: Manifest, next_bucket: Callable[[], torch.Tensor]) -> None:
        self.manifest = manifest
        self.patches = self._decoded(next_bucket)
        """Segments that changed, each with its patch, to be read once.

        Raises `ProtocolError` for bytes that are no delta of the segment, and the errors of `next_bucket`.
        """

    @property
    def version(self) -> int:
        """The version that the delta leads to."""
        return self.manifest.version

    def _decoded(self, next_bucket: Callable[[], torch.Tensor]) -> Iterator[tuple[DeltaSegment, Patch]]:
        left = torch.empty(0, dtype=torch.uint8)
        for segment in self.manifest.segments:
            spec = self.manifest.specs[segment.tensor]
            parts, missing = [left], segment.nbytes - left.numel()
            while missing > 0:
                parts.append(next_bucket().cpu())
                missing -= parts[-1].numel()
            data = torch.cat(parts) if len(parts) > 1 else left
            left, data = data[segment.nbytes :], data[: segment.nbytes]
            try:
                patch = decode(data, elements=segment.numel, itemsize=spec.dtype.itemsize)
            except ProtocolError as error:
                raise ProtocolError(f"the delta of {spec.name}: {error.message}", part=error.part) from error
            if patch.carried:
                yield segment, patch

    def where(self, segment: DeltaSegment) -> TensorSlice:
        """The slice of a checkpoint tensor that a segment changes."""
        return _changed_slice(self.manifest, segment)


@dataclass(frozen=True, slots=True)
class StagedDelta:
    """The patches that turn one version into another."""

    manifest: Manifest
    patches: tuple[tuple[DeltaSegment, Patch], ...]
    """Segments that changed, each with its patch."""

    @classmethod
    def of(cls, delta: IncomingDelta) -> StagedDelta:
        """Wait for all of `delta`. Raises the errors of `IncomingDelta.patches`."""
        return cls(delta.manifest, tuple(delta.patches))

    @property
    def version(self) -> int:
        """The version that the delta leads to."""
        return self.manifest.version

    @property
    def nbytes(self) -> int:
        """Memory of the patches in bytes."""
        return sum(patch.nbytes for _, patch in self.patches)

    @property
    def as_dense(self) -> Manifest:
        """The manifest that the same version would have in full."""
        return replace(self.manifest, codec=CODEC_DENSE, base_version=None, base_identity="", segments=())

    def to(self, device: torch.device) -> StagedDelta:
        """The delta on another device."""
        return replace(self, patches=tuple((segment, patch.to(device)) for segment, patch in self.patches))

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Flip the bits of `tensors` in which the two versions differ.

        This turns the base into the version; the same again rolls back.

        Args:
            tensors: The tensors of the checkpoint by name, contiguous, on the device of the patches.
        """
        for segment, patch in self.patches:
            where = _changed_slice(self.manifest, segment)
            _swap(patch, tensors[where.spec.name], where.box)

    def swap_staged(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Flip as `swap` does, in the tensors of the stream."""
        for segment, patch in self.patches:
            _swap(patch, tensors[self.manifest.specs[segment.tensor].name], segment.box)


def _changed_slice(manifest: Manifest, segment: DeltaSegment) -> TensorSlice:
    region = manifest.regions[segment.tensor]
    return TensorSlice(region.spec, segment.box.moved_into(region.box))


def _swap(patch: Patch, tensor: torch.Tensor, box: Box) -> None:
    """Flip bits of the slice `box` of `tensor`."""
    rows = box.rows(tuple(tensor.shape))
    if rows is not None and rows[2] == 1:
        patch.flip_(tensor.view(-1)[rows[0] : rows[0] + rows[1]])
        return
    part = tensor[box.index]
    packed = part.contiguous()
    patch.flip_(packed)
    part.copy_(packed)
