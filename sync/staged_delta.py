"""The receiver's side of a delta: decoded while it arrives, proven valid, and ready to be put into what it applies to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from weightlane.ckpt_engines import ProtocolError

from .codecs.delta import Patch, decode
from .manifest import CODEC_DENSE, Manifest, Segment


class IncomingDelta:
    """A delta of which the beginning has arrived: decoded segment by segment, each as soon as it is there.

    Args:
        manifest: What is to come.
        received: Filled from the front with what crosses the wire: 1-D uint8, not needed once `patches` has ended.
        ready: ``ready(n)`` returns once the first `n` bytes are there and verified, or raises why they never will be.
    """

    def __init__(
        self, manifest: Manifest, received: torch.Tensor, ready: Callable[[int], None] = lambda _: None
    ) -> None:
        self.manifest = manifest
        self.patches = self._decoded(received, ready)
        """By segment, once; none for a segment without a change. Raises `ProtocolError` at what is not a delta of its segment."""

    @property
    def version(self) -> int:
        """The version it leads to."""
        return self.manifest.version

    def _decoded(self, received: torch.Tensor, ready: Callable[[int], None]) -> Iterator[tuple[Segment, Patch]]:
        at = 0
        for segment in self.manifest.segments:
            spec = self.manifest.specs[segment.tensor]
            ready(at + segment.nbytes)
            data = received[at : at + segment.nbytes].cpu()
            try:
                patch = decode(data, elements=segment.numel, itemsize=spec.dtype.itemsize)
            except ProtocolError as error:
                raise ProtocolError(f"the delta of {spec.name}: {error.message}", part=error.part) from error
            if patch.carried:
                yield segment, patch
            at += segment.nbytes


@dataclass(frozen=True, slots=True)
class StagedDelta:
    """What turns one version into another, tensor by tensor."""

    manifest: Manifest
    patches: tuple[tuple[Segment, Patch], ...]
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
        """Exchange the changed elements of `tensors` (by name, contiguous, on this device) with those held here.

        That turns the base into the version; doing it again restores the base.
        """
        for segment, patch in self.patches:
            flat = tensors[self.manifest.specs[segment.tensor].name].view(-1)
            patch.swap_(flat[segment.start : segment.start + segment.numel])
