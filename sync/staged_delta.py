"""The receiver's side of a delta: decoded, proven valid, and ready to be put into what it applies to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from weightlane.ckpt_engines import ProtocolError

from .codecs.delta import Patch, decode
from .manifest import CODEC_DENSE, Manifest, Segment


@dataclass(frozen=True, slots=True)
class StagedDelta:
    """What turns one version into another, tensor by tensor."""

    manifest: Manifest
    patches: tuple[tuple[Segment, Patch], ...]
    """By segment; none for a segment without a change."""

    @classmethod
    def decode(cls, manifest: Manifest, received: torch.Tensor) -> StagedDelta:
        """Decode what arrived: `received` is 1-D uint8 on CPU, and not needed afterwards.

        Raises `ProtocolError` for anything that is not a delta of the manifest's segments.
        """
        patches: list[tuple[Segment, Patch]] = []
        at = 0
        for segment in manifest.segments:
            spec = manifest.specs[segment.tensor]
            data = received[at : at + segment.nbytes]
            try:
                patch = decode(data, elements=segment.numel, itemsize=spec.dtype.itemsize)
            except ProtocolError as error:
                raise ProtocolError(f"the delta of {spec.name}: {error.message}", part=error.part) from error
            if patch.carried:
                patches.append((segment, patch))
            at += segment.nbytes
        return cls(manifest, tuple(patches))

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
        """Exchange the changed elements of `tensors` (by name, contiguous, on this device) with those held here.

        That turns the base into the version; doing it again restores the base.
        """
        for segment, patch in self.patches:
            flat = tensors[self.manifest.specs[segment.tensor].name].view(-1)
            patch.swap_(flat[segment.start : segment.start + segment.numel])
