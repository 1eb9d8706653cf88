"""`Staging`: the memory of one rollout rank in which versions wait for their commit, and in which the old one is kept."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import CommitError, StagingMemoryError

from .manifest import Manifest
from .trailer import TRAILER_BYTES

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Slot:
    """One version's worth of memory."""

    data: torch.Tensor
    manifest: Manifest | None = None
    """Of the complete version it holds; None while it holds nothing of use."""

    @property
    def version(self) -> int:
        return -1 if self.manifest is None else self.manifest.version


class Staging:
    """Two slots at most: one is filled while the other may hold the version that serves.

    Thread-safe. The slots change roles when a version has committed, so that memory which somebody is loading, or which
    a rollback would need, is never filled.

    Args:
        part: Name of the owner for error messages.
        limit_bytes: Most memory the slots may take together; 0 means no limit.
        device: Where they lie.
    """

    def __init__(self, part: str, limit_bytes: int, device: torch.device) -> None:
        self._part = part
        self._limit = limit_bytes
        self._device = device
        self._lock = threading.Lock()
        self._incoming = self._empty()
        self._serving = self._empty()
        self._taken: int | None = None

    def reserve(self, manifest: Manifest) -> None:
        """Make ready for a version; what was staged before and has not committed is dropped.

        Raises `StagingMemoryError` when it would need more than the limit, or `CommitError` while an earlier version is still
        being loaded.
        """
        needed = _needed(manifest)
        if self._limit and needed > self._limit:
            raise StagingMemoryError(
                f"staging version {manifest.version} needs {needed / 2**20:.1f} MiB, {self._limit / 2**20:.1f} MiB are allowed.",
                part=self._part,
                hint="Raise rollout.staging_limit_bytes, or give the rollout less KV cache.",
            )
        with self._lock:
            if self._taken is not None:
                raise CommitError(
                    f"version {self._taken} is still being loaded here.",
                    part=self._part,
                    hint="Its commit outlived its deadline; the next version will be taken once it has ended.",
                )
            self._incoming.manifest = None
            if self._limit and needed + self._serving.data.numel() > self._limit:
                self._serving = self._empty()

    def memory(self, manifest: Manifest) -> torch.Tensor:
        """The bytes to fill: uint8, as long as the version's stream and one trailer."""
        needed = _needed(manifest)
        if self._incoming.data.numel() < needed:
            self._incoming = self._empty()  # the old memory goes before the new one comes
            # Filled once: first-touch page faults would otherwise land in the middle of the first version.
            self._incoming = _Slot(torch.zeros(needed, dtype=torch.uint8, device=self._device))
        return self._incoming.data[:needed]

    def complete(self, manifest: Manifest) -> None:
        """Everything has arrived and was verified."""
        with self._lock:
            self._incoming.manifest = manifest

    def take(self, version: int) -> dict[str, torch.Tensor]:
        """Views of the staged tensors of `version`; `CommitError` if it is not staged."""
        with self._lock:
            if self._incoming.version != version:
                have = "nothing" if self._incoming.manifest is None else f"version {self._incoming.version}"
                raise CommitError(
                    f"version {version} is not staged here ({have} is).",
                    part=self._part,
                    hint="Commit a version only after the coordinator reports it staged.",
                )
            self._taken = version
            return _tensors(self._incoming)

    def take_previous(self, version: int) -> tuple[int, dict[str, torch.Tensor]]:
        """The version kept from before `version`, and its tensors; `CommitError` if there is none."""
        with self._lock:
            if self._serving.manifest is None or self._serving.version >= version:
                raise CommitError(
                    f"the version before {version} is not kept here.",
                    part=self._part,
                    hint="It is where rollout.staging_limit_bytes allows twice a version's size, from the second version on.",
                )
            self._taken = self._serving.version
            return self._serving.version, _tensors(self._serving)

    def release(self, version: int) -> None:
        """Whoever took `version` is done with its memory."""
        with self._lock:
            if self._taken == version:
                self._taken = None

    def commit(self, version: int) -> None:
        """`version` serves: keep it, and give the memory of the one before for the next."""
        with self._lock:
            if self._incoming.version != version:
                return
            if not self._limit or 2 * self._incoming.data.numel() <= self._limit:
                self._incoming, self._serving = self._serving, self._incoming
            self._incoming.manifest = None

    def abort(self, version: int) -> None:
        """`version` will not be committed."""
        with self._lock:
            if self._incoming.version == version:
                self._incoming.manifest = None

    def drop(self) -> None:
        """Forget what is staged and not taken; the version that serves stays."""
        with self._lock:
            if self._taken is None or self._taken != self._incoming.version:
                self._incoming.manifest = None

    def _empty(self) -> _Slot:
        return _Slot(torch.empty(0, dtype=torch.uint8, device=self._device))


def _needed(manifest: Manifest) -> int:
    return manifest.total_bytes + TRAILER_BYTES


def _tensors(slot: _Slot) -> dict[str, torch.Tensor]:
    assert slot.manifest is not None
    return {
        entry.spec.name: slot.data[entry.offset : entry.end].view(entry.spec.dtype).view(entry.spec.shape)
        for entry in slot.manifest.entries
    }
