"""The tensors of a version of which slices have come, each put together when it is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from weightlane.ckpt_engines import CommitError

from .boxes import Box
from .manifest import Manifest


class SlicedTensors(Mapping[str, torch.Tensor]):
    """Every tensor of the checkpoint by name. What has come in one piece is that piece, anything else a new tensor each time.

    Args:
        manifest: Of the version; it goes by a transfer plan.
        staged: What has come, by the names of the manifest's `specs`.
    """

    def __init__(self, manifest: Manifest, staged: Mapping[str, torch.Tensor]) -> None:
        assert manifest.slicing is not None, "it goes by a transfer plan"
        self.slicing = manifest.slicing
        """The same object for all versions of a session."""
        self.staged = staged
        """What has come, by the names under which it came."""
        self.regions = dict(zip(staged, manifest.regions, strict=True))
        """Which slice of which tensor each of that is."""
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self._parts: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
        for spec, region in zip(manifest.specs, manifest.regions, strict=True):
            self._parts[region.spec.name].append((region.box, staged[spec.name]))

    def __getitem__(self, name: str) -> torch.Tensor:
        """All of a tensor. `CommitError` if only slices of it have come."""
        spec, parts = self._specs[name], self.parts(name)
        if sum(box.numel for box, _ in parts) != spec.numel:
            raise CommitError(
                f"{name} was to be loaded whole, and only the slices that this rank needs have come.",
                part="sliced version",
                hint="The next version brings all of it.",
            )
        return self.partly(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def parts(self, name: str) -> Sequence[tuple[Box, torch.Tensor]]:
        """Which slices of a tensor have come, each with its elements; they do not overlap."""
        return self._parts.get(name, ())

    @torch.no_grad()
    def partly(self, name: str) -> torch.Tensor:
        """A tensor with what has come of it; the rest is undefined."""
        spec, parts = self._specs[name], self.parts(name)
        if len(parts) == 1 and parts[0][0] == Box.whole(spec.shape):
            return parts[0][1]
        device = parts[0][1].device if parts else torch.device("cpu")
        whole = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        for box, values in parts:
            whole[box.index].copy_(values)
        return whole

    def without_data(self, name: str) -> torch.Tensor:
        """What `name` gives, on the meta device."""
        spec = self._specs[name]
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
