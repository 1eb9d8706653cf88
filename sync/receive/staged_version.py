"""Staged versions: a `StagingSlot` holds one in the rollout rank's memory, a `ViewedVersion` is one in its senders' memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines.runtime.devices import HOST, DeviceRuntime, runtime_of
from weightlane.ckpt_engines.runtime.tensor_bytes import copy_bytes

from ..version.manifest import Manifest


@dataclass(slots=True)
class StagingSlot:
    """Memory for one version: `data` is 1-D uint8, at least as long as the version's stream."""

    data: torch.Tensor
    manifest: Manifest | None = None
    """Manifest of the complete version in `data`; None while there is none."""

    @property
    def version(self) -> int:
        """The version in `data`; -1 while there is none."""
        return -1 if self.manifest is None else self.manifest.version

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the tensors of the stream by name."""
        assert self.manifest is not None
        return self.manifest.views(self.data[: self.manifest.total_bytes])


def new_receive_memory(nbytes: int, device: torch.device, live: DeviceRuntime) -> torch.Tensor:
    """Allocate zeroed memory on `device` (1-D uint8) to receive into. Its content is later copied to the device of `live`."""
    # Zeroed: first-touch page faults would otherwise slow down the first version.
    if device == HOST:
        return live.host_memory(nbytes)
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    runtime_of(device).synchronize()  # buckets arrive on other streams, which do not wait for the zeros
    return memory


@dataclass(slots=True)
class ViewedVersion:
    """A version whose tensors are views of its senders' memory, which must be released to the senders."""

    manifest: Manifest
    runs: Sequence[tuple[int, torch.Tensor]]
    """First byte in the stream and the bytes (1-D uint8) of each run: one run for each section of the stream."""
    committed: bool | None = None
    """True once the version serves, False once it was aborted."""

    @classmethod
    def of(cls, manifest: Manifest, buckets: Mapping[int, torch.Tensor]) -> ViewedVersion | None:
        """The version with these `buckets`, by index; None if the buckets of a section are not contiguous in memory."""
        runs = []
        for section, (start, _) in enumerate(manifest.bounds):
            run = adjoined([buckets[index] for index in manifest.buckets_of(section)])
            if run is None:
                return None
            runs.append((start, run))
        return cls(manifest, runs)

    @property
    def version(self) -> int:
        """The version's number."""
        return self.manifest.version

    @property
    def nbytes(self) -> int:
        """Length of the stream in bytes."""
        return max((start + run.numel() for start, run in self.runs), default=0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the tensors of the stream by name."""
        if len(self.runs) == 1:
            return self.manifest.views(self.runs[0][1])
        views: dict[str, torch.Tensor] = {}
        for section, (_, run) in enumerate(self.runs):
            views |= self.manifest.only([section]).views(run)
        return views

    def copy_to(self, stream: torch.Tensor) -> None:
        """Copy the version into `stream`, 1-D uint8 of at least `nbytes`."""
        for start, run in self.runs:
            copy_bytes(stream[start : start + run.numel()], run)


def adjoined(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One view of all `views` (1-D uint8) if each starts where the one before ends in the same storage; else None."""
    if not views:
        return torch.empty(0, dtype=torch.uint8)
    first, total = views[0], sum(view.numel() for view in views)
    place, storage = first.storage_offset(), first.untyped_storage()
    for view in views:
        if view.untyped_storage().data_ptr() != storage.data_ptr() or view.storage_offset() != place:
            return None
        place += view.numel()
    return first.as_strided((total,), (1,), first.storage_offset())
