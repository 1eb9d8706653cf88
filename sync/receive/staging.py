"""`Staging`: holds a rollout rank's staged version until its commit, and the one that serves."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import torch

from weightlane.ckpt_engines import CommitError, DeltaBaseError, StagingMemoryError
from weightlane.ckpt_engines.runtime.devices import DeviceRuntime, runtime_of

from ..codecs.delta.staged_delta import StagedDelta
from ..version.manifest import Manifest
from .staged_version import StagingSlot, ViewedVersion, new_receive_memory

_log = logging.getLogger(__name__)
_DELTA_FACTOR = 8
"""Memory to receive and decode a delta, in bytes per byte on the wire, where it changes few elements."""


@dataclass(slots=True)
class _AppliedDelta:
    """The delta applied to the serving slot for a version that is not committed yet. Applying it again rolls the slot back."""

    delta: StagedDelta
    base: Manifest
    """Manifest of the version before."""
    aborted: bool = False
    """Whether the version was aborted while it was being loaded; it is rolled back afterwards."""


class Staging:
    """At most two slots of memory and one viewed version. Thread-safe.

    One slot is filled while the other keeps the version that serves, if the limit allows two. A commit swaps the slots, so that
    memory is never filled while a version is loaded from it or a rollback needs it. A viewed version needs no slot until it
    serves; `clean_up` then copies it into one. A delta is applied to the serving slot, and rolled back if its version is aborted.
    If the caller can apply deltas to the live weights, a prepared delta is kept instead, and the identity of the live weights,
    because a delta may only be applied to its base.

    Args:
        part: Name of the owner for error messages.
        limit_bytes: Upper limit for the memory of both slots together; 0 means no limit.
        device: Device of the slots.
        live: Runtime of the live model's device, to which versions are copied from the slots; by default that of `device`.
    """

    def __init__(self, part: str, limit_bytes: int, device: torch.device, live: DeviceRuntime | None = None) -> None:
        self._part = part
        self._limit = limit_bytes
        self._device = device
        self._runtime = runtime_of(device)
        self._live = live or self._runtime
        self._lock = threading.Lock()
        self._incoming = self._empty()
        self._serving = self._empty()
        self._viewed: ViewedVersion | None = None
        self._applied: _AppliedDelta | None = None
        self._taken: int | None = None
        """The version that is being loaded."""
        self._committed = -1
        """The version that serves; the serving slot may keep an older one."""
        self.live_identity = ""
        """Identity of the publication in the live weights; empty while that is not certain."""
        self._identity_before = ""
        self._newest = (-1, "")
        """Number and identity of the version staged last."""
        self._prepared: tuple[int, Any] | None = None
        """Version of the staged delta to the live weights, and the result of `Subscriber.prepare_delta` for it."""

    def kept_identity(self, plan: str) -> str:
        """Identity of the kept version; empty if none is kept in the slices of `plan`, or an uncommitted delta is applied."""
        with self._lock:
            if self._applied is not None:
                return ""
            viewed = self._viewed
            # `clean_up` is about to copy a viewed version that serves.
            kept = viewed if viewed is not None and self._is_to_be_kept(viewed) else self._serving
            manifest = kept.manifest
            return manifest.identity if manifest is not None and manifest.plan == plan else ""

    def forget_kept(self) -> None:
        """Free the serving slot, unless it is being loaded."""
        with self._lock:
            if self._taken is None:
                self._applied = None
                self._serving = self._empty()

    def _is_to_be_kept(self, viewed: ViewedVersion) -> bool:
        return bool(viewed.committed) and not 0 < self._limit < viewed.nbytes

    def reserve(self, manifest: Manifest, *, viewed: bool = False, live: bool = False) -> None:
        """Make room for a version, which will be `viewed` or received. Drops an earlier version that is not committed.

        A delta will be applied to the kept version, or to the `live` weights.

        Raises:
            StagingMemoryError: The version needs more memory than the limit.
            DeltaBaseError: A delta, together with the kept base unless it is `live`, needs more memory than the limit.
            CommitError: An earlier version is being loaded.
        """
        needed = 0 if viewed else _DELTA_FACTOR * manifest.wire_bytes if manifest.is_delta else manifest.total_bytes
        if 0 < self._limit < needed and not manifest.is_delta:
            raise StagingMemoryError(
                f"staging version {manifest.version} needs {needed / 2**20:.1f} MiB, {self._limit / 2**20:.1f} MiB are allowed.",
                part=self._part,
                hint="Raise rollout.staging_limit_bytes (with less KV cache, if need be), or set rollout.commit to in_place,"
                " which needs one bucket.",
            )
        with self._lock:
            if self._taken is not None:
                raise CommitError(
                    f"version {self._taken} is still being loaded here.",
                    part=self._part,
                    hint="Its commit outlived its deadline; the next version will be taken once it has ended.",
                )
            to_copy = self._viewed if self._viewed is not None and self._is_to_be_kept(self._viewed) else None
            kept = to_copy.nbytes if to_copy else self._serving.data.numel()
            is_too_much = 0 < self._limit < needed + kept
            if manifest.is_delta and 0 < self._limit < needed + (0 if live else kept):
                raise DeltaBaseError(
                    f"version {manifest.version} is a delta that needs {needed / 2**20:.1f} MiB beside version"
                    f" {manifest.base_version} of {kept / 2**20:.1f} MiB, {self._limit / 2**20:.1f} MiB are allowed.",
                    part=self._part,
                    hint="The coordinator has the version sent in full then. Raise rollout.staging_limit_bytes for deltas.",
                )
            self._incoming.manifest = None
            self._roll_back_delta()
            if self._viewed is not None and (self._viewed.committed is None or is_too_much):
                self._viewed = None  # also while `clean_up` copies it
            if viewed or manifest.is_delta:
                self._incoming = self._empty()  # not filled by this version
            if is_too_much:
                self._serving = self._empty()

    def memory(self, manifest: Manifest) -> torch.Tensor:
        """The memory to fill with the version's stream: 1-D uint8, of the stream's length."""
        needed = manifest.total_bytes
        if self._incoming.data.numel() < needed:
            self._incoming = self._empty()  # frees the old memory before the new memory is allocated
            self._incoming = self._new_slot(needed)
        return self._incoming.data[:needed]

    def complete(self, manifest: Manifest) -> None:
        """Stage the version whose verified stream is in the memory returned by `memory`."""
        with self._lock:
            self._incoming.manifest = manifest

    def complete_viewed(self, viewed: ViewedVersion) -> None:
        """Stage a viewed and verified version."""
        with self._lock:
            self._viewed = viewed

    def complete_prepared(self, version: int, delta: Any) -> None:
        """Stage `version`, whose verified `delta` was prepared for the live weights."""
        self._prepared = version, delta

    def note_staged(self, manifest: Manifest) -> None:
        """Note that a version is staged, or written into the live weights."""
        self._newest = manifest.version, manifest.identity

    def apply(self, delta: StagedDelta) -> None:
        """Apply `delta` to the kept version to stage its version. Raises `DeltaBaseError` if its base is not kept."""
        with self._lock:
            kept = self._serving.manifest
            if (
                kept is None
                or self._applied is not None
                or (kept.identity, kept.plan) != (delta.manifest.base_identity, delta.manifest.plan)
            ):
                raise lacks_base(delta.manifest, self._part, "nothing" if kept is None else f"version {kept.version}")
            delta = delta.to(self._device)
            self._swap(delta)
            self._serving.manifest, self._applied = delta.as_dense, _AppliedDelta(delta, kept)

    def _swap(self, delta: StagedDelta) -> None:
        tensors, self._serving.manifest = self._serving.tensors(), None  # a mixture, if the swap fails half-way
        delta.swap_staged(tensors)
        self._runtime.synchronize()  # the version is loaded on another stream

    def _roll_back_delta(self) -> None:
        applied, self._applied = self._applied, None
        if applied is not None:
            self._swap(applied.delta)
            self._serving.manifest = applied.base

    def _applied_version(self) -> int:
        return -1 if self._applied is None else self._applied.delta.version

    def take(self, version: int) -> tuple[Manifest, dict[str, torch.Tensor]]:
        """The staged `version`: its manifest, and views of the tensors of its stream by name, valid until `release`.

        Raises `CommitError` if it is not staged.
        """
        with self._lock:
            staged: list[StagingSlot | ViewedVersion] = [self._incoming]
            if self._viewed is not None and self._viewed.committed is None:
                staged.insert(0, self._viewed)
            if self._applied is not None and not self._applied.aborted:
                staged.insert(0, self._serving)
            for slot in staged:
                if slot.version == version and slot.manifest is not None:
                    self._taken = version
                    self.write_live()
                    return slot.manifest, slot.tensors()
            newest = max(slot.version for slot in staged)
            have = f"version {newest}" if newest >= 0 else "nothing"
        raise CommitError(
            f"version {version} is not staged here ({have} is).",
            part=self._part,
            hint="Commit a version only after the coordinator reports it staged.",
        )

    def prepared_delta(self, version: int) -> Any | None:
        """The prepared delta to `version`, if there is one."""
        return self._prepared[1] if self._prepared is not None and self._prepared[0] == version else None

    def forget_prepared(self, version: int | None = None) -> None:
        """Free the prepared delta if it is the one to `version`; by default free any."""
        if self._prepared is not None and version in (None, self._prepared[0]):
            self._prepared = None

    def write_live(self) -> None:
        """Note that a version is being written into the live weights."""
        self.live_identity, self._identity_before = "", self.live_identity

    def restore_live(self) -> None:
        """Note that the live weights are the same as before they were written to."""
        self.live_identity = self._identity_before

    def lose_live(self) -> None:
        """Note that the live weights are gone."""
        self.live_identity = self._identity_before = ""
        self.forget_prepared()

    def take_previous(self, version: int) -> tuple[Manifest, dict[str, torch.Tensor]]:
        """The version that served before `version`, as from `take`. Raises `CommitError` if it is not kept."""
        with self._lock:
            if self._applied_version() == version:
                self._roll_back_delta()
            kept, manifest = self._serving.version, self._serving.manifest
            if manifest is None or kept >= version or kept != self._committed:
                raise CommitError(
                    f"the version before {version} is not kept here.",
                    part=self._part,
                    hint="It is where rollout.staging_limit_bytes leaves room for it, from the second version on.",
                )
            self._taken = kept
            return manifest, self._serving.tensors()

    def release(self, version: int) -> None:
        """End the use of the tensors of `version` that `take` or `take_previous` returned."""
        with self._lock:
            if self._taken == version:
                self._taken = None

    def commit(self, version: int) -> None:
        """Keep `version`, which serves now, if there is room, and free the slot of the version before.

        A viewed version is copied by `clean_up`.
        """
        with self._lock:
            self._committed = version
            newest, identity = self._newest
            self.live_identity, self._identity_before = (identity if newest == version else ""), ""
            self.forget_prepared(version)
            if self._applied_version() == version:
                self._applied = None
            elif self._viewed is not None and self._viewed.version == version:
                self._viewed.committed = True
            elif self._incoming.version == version:
                if not self._limit or 2 * self._incoming.data.numel() <= self._limit:
                    self._incoming, self._serving = self._serving, self._incoming
                self._incoming.manifest = None

    def abort(self, version: int) -> None:
        """Drop `version`, unless it already serves."""
        with self._lock:
            self.forget_prepared(version)
            if self._viewed is not None and self._viewed.version == version and self._viewed.committed is None:
                self._viewed.committed = False
            if self._applied is not None and self._applied.delta.version == version:
                self._applied.aborted = True
                if self._taken != version:
                    self._roll_back_delta()
            if self._incoming.version == version:
                self._incoming.manifest = None

    def clean_up(self, version: int, *, keep: bool = True) -> bool:
        """Do the work that `release`, `commit` or `abort` of `version` has deferred. Called from one thread.

        Rolls back an aborted delta that was being loaded. Copies a viewed version that serves into a slot; without `keep`, only
        if no delta will be based on it.

        Returns:
            Whether the memory of `version` can be released to its senders.
        """
        with self._lock:
            if self._applied is not None and self._applied.aborted and self._taken is None:
                self._roll_back_delta()
            viewed = self._viewed
            if viewed is None or viewed.version != version:
                return True
            if viewed.committed is None or self._taken == version:
                return False
            copied = self._is_to_be_kept(viewed) and self._taken is None and (keep or not viewed.manifest.identity)
            copied = copied and version == self._committed  # no later version serves already
            memory = self._serving.data if copied and self._serving.data.numel() >= viewed.nbytes else None
            if copied:
                self._serving = self._empty()  # frees memory that is too small before other memory is allocated
        slot = self._copy_of(viewed, memory) if copied else None
        with self._lock:
            if self._viewed is viewed:  # `reserve` has not dropped it in the meantime
                self._viewed = None
                if slot is not None and version == self._committed:
                    self._serving = slot
        return True

    def _copy_of(self, viewed: ViewedVersion, memory: torch.Tensor | None) -> StagingSlot | None:
        try:
            data = self._new_slot(viewed.nbytes).data if memory is None else memory
        except (RuntimeError, MemoryError) as error:
            _log.warning("%s: no memory to keep version %d for a rollback: %s", self._part, viewed.version, error)
            return None
        viewed.copy_to(data)
        return StagingSlot(data, viewed.manifest)

    def drop(self) -> None:
        """Drop staged versions, unless they are being loaded. Keeps the version that serves."""
        with self._lock:
            self.forget_prepared()
            if self._taken is None or self._taken != self._incoming.version:
                self._incoming.manifest = None
            if self._taken != self._applied_version():
                self._roll_back_delta()
            if self._viewed is not None and self._viewed.committed is None and self._taken != self._viewed.version:
                self._viewed = None

    def close(self) -> None:
        """Free all memory. Memory that a caller still holds views of is freed with the last view."""
        with self._lock:
            self.forget_prepared()
            self._incoming, self._serving, self._viewed, self._applied = self._empty(), self._empty(), None, None

    def _empty(self) -> StagingSlot:
        return StagingSlot(torch.empty(0, dtype=torch.uint8, device=self._device))

    def _new_slot(self, nbytes: int) -> StagingSlot:
        return StagingSlot(new_receive_memory(nbytes, self._device, self._live))


def lacks_base(manifest: Manifest, part: str, have: str) -> DeltaBaseError:
    """The error for a delta whose base is not here; `have` names the version that is here."""
    return DeltaBaseError(
        f"version {manifest.version} is a delta to version {manifest.base_version} ({manifest.base_identity}), {have} is here.",
        part=part,
        hint="The coordinator has the version sent in full then.",
    )
