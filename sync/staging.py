"""`Staging`: where versions wait for their commit on one rollout rank, and where the one that serves is kept."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import CommitError, StagingMemoryError

from .manifest import Manifest

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Slot:
    """A version's worth of memory."""

    data: torch.Tensor
    manifest: Manifest | None = None
    """Of the complete version it holds; None while it holds nothing of use."""

    @property
    def version(self) -> int:
        return -1 if self.manifest is None else self.manifest.version

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of its tensors by name."""
        assert self.manifest is not None
        return {
            entry.spec.name: self.data[entry.offset : entry.end].view(entry.spec.dtype).view(entry.spec.shape)
            for entry in self.manifest.entries
        }


@dataclass(slots=True)
class _Lent(_Slot):
    """A version that lies in its sender's memory, which wants it back."""

    committed: bool | None = None
    """Whether it serves or was given up; None before either."""


class Staging:
    """Two slots of its own at most, and at times a version in its sender's memory. Thread-safe.

    One slot is filled while the other holds the version that serves, for as long as memory allows. They change roles when a
    version has committed, so that memory which somebody is loading, or which a rollback would need, is never filled. A version
    that lies in its sender's memory needs no slot until it serves; then it is copied into one (`settle`).

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
        self._lent: _Lent | None = None
        self._taken: int | None = None

    def reserve(self, manifest: Manifest, *, lent: bool = False) -> None:
        """Make ready for a version; what was staged before and has not committed is dropped.

        With `lent` it is going to lie in its sender's memory.

        Raises `StagingMemoryError` when it would need more than the limit, or `CommitError` while an earlier version is still
        being loaded.
        """
        needed = 0 if lent else manifest.total_bytes
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
            if self._lent is not None and self._lent.committed is None:
                self._lent = None
            if lent:
                self._incoming = self._empty()  # nobody fills it
            if self._limit and needed + self._serving.data.numel() > self._limit:
                self._serving = self._empty()

    def memory(self, manifest: Manifest) -> torch.Tensor:
        """The bytes to fill: uint8, as long as the version's stream."""
        needed = manifest.total_bytes
        if self._incoming.data.numel() < needed:
            self._incoming = self._empty()  # the old memory goes before the new one comes
            self._incoming = self._new(needed)
        return self._incoming.data[:needed]

    def complete(self, manifest: Manifest, lent: torch.Tensor | None = None) -> None:
        """Everything has arrived and was verified: in `memory`, or in the sender's memory `lent`."""
        with self._lock:
            if lent is None:
                self._incoming.manifest = manifest
            else:
                self._lent = _Lent(lent, manifest)

    def take(self, version: int) -> dict[str, torch.Tensor]:
        """Views of the staged tensors of `version`; `CommitError` if it is not staged."""
        with self._lock:
            staged = [self._incoming]
            if self._lent is not None and self._lent.committed is None:
                staged.insert(0, self._lent)
            for slot in staged:
                if slot.version == version:
                    self._taken = version
                    return slot.tensors()
            newest = max(slot.version for slot in staged)
            have = f"version {newest}" if newest >= 0 else "nothing"
        raise CommitError(
            f"version {version} is not staged here ({have} is).",
            part=self._part,
            hint="Commit a version only after the coordinator reports it staged.",
        )

    def take_previous(self, version: int) -> tuple[int, dict[str, torch.Tensor]]:
        """The version kept from before `version`, and its tensors; `CommitError` if there is none."""
        with self._lock:
            if self._serving.manifest is None or self._serving.version >= version:
                raise CommitError(
                    f"the version before {version} is not kept here.",
                    part=self._part,
                    hint="It is where rollout.staging_limit_bytes leaves room for it, from the second version on.",
                )
            self._taken = self._serving.version
            return self._serving.version, self._serving.tensors()

    def release(self, version: int) -> None:
        """Whoever took `version` is done with its memory."""
        with self._lock:
            if self._taken == version:
                self._taken = None

    def commit(self, version: int) -> None:
        """`version` serves: keep it, and give the memory of the one before for the next. A lent one waits for `settle`."""
        with self._lock:
            if self._lent is not None and self._lent.version == version:
                self._lent.committed = True
                return
            if self._incoming.version != version:
                return
            if not self._limit or 2 * self._incoming.data.numel() <= self._limit:
                self._incoming, self._serving = self._serving, self._incoming
            self._incoming.manifest = None

    def abort(self, version: int) -> None:
        """`version` will not be committed."""
        with self._lock:
            if self._lent is not None and self._lent.version == version:
                self._lent.committed = False
            if self._incoming.version == version:
                self._incoming.manifest = None

    def settle(self, version: int) -> bool:
        """Whether nobody here needs the sender's memory of `version` any more; if it serves, it is copied first.

        Call it after `release`, `commit` and `abort`, from one thread.
        """
        with self._lock:
            lent = self._lent
            if lent is None or lent.version != version:
                return True
            if lent.committed is None or self._taken == version:
                return False
            serving = None
            if lent.committed and self._taken is None and not 0 < self._limit < lent.data.numel():
                serving = self._serving
                serving.manifest = None
        if serving is not None:
            if serving.data.numel() < lent.data.numel():
                serving = self._serving = self._empty()  # the old memory goes before the new one comes
                serving = self._serving = self._new(lent.data.numel())
            serving.data[: lent.data.numel()].copy_(lent.data)
        with self._lock:
            if serving is not None:
                serving.manifest = lent.manifest
            self._lent = None
        return True

    def drop(self) -> None:
        """Forget what is staged and not taken; the version that serves stays."""
        with self._lock:
            if self._taken is None or self._taken != self._incoming.version:
                self._incoming.manifest = None
            if self._lent is not None and self._lent.committed is None and self._taken != self._lent.version:
                self._lent = None

    def _empty(self) -> _Slot:
        return _Slot(torch.empty(0, dtype=torch.uint8, device=self._device))

    def _new(self, nbytes: int) -> _Slot:
        # Filled once: first-touch page faults would otherwise land in the middle of the first version.
        return _Slot(torch.zeros(nbytes, dtype=torch.uint8, device=self._device))
