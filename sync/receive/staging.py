"""`Staging`: where versions wait for their commit on one rollout rank, and where the one that serves is kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import CommitError, DeltaBaseError, StagingMemoryError
from weightlane.ckpt_engines.runtime.devices import HOST, DeviceRuntime, runtime_of
from weightlane.ckpt_engines.runtime.host_copies import copy_bytes

from ..codecs.delta.staged_delta import StagedDelta
from ..version.manifest import Manifest

_log = logging.getLogger(__name__)
HandOut = Callable[[Manifest, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
_DELTA_FACTOR = 4
"""A delta's memory while it is received and decoded, per byte on the wire, at most."""


@dataclass(slots=True)
class _StagingSlot:
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
        return self.manifest.views(self.data[: self.manifest.total_bytes])


@dataclass(frozen=True, slots=True)
class Stream:
    """A version's stream where it lies, in a piece or several."""

    parts: Sequence[tuple[int, torch.Tensor]]
    """First byte in the stream, and the bytes: 1-D uint8, without overlap; whole tensors each."""

    @property
    def nbytes(self) -> int:
        """Length of the stream."""
        return max((start + part.numel() for start, part in self.parts), default=0)

    def views(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """The tensors of `manifest` by name."""
        if len(self.parts) == 1:
            return manifest.views(self.parts[0][1])
        views: dict[str, torch.Tensor] = {}
        for number, (_, part) in enumerate(self.parts):
            views |= manifest.only([number]).views(part)
        return views

    def copy_to(self, memory: torch.Tensor) -> None:
        """Copy it to where a whole stream goes."""
        for start, part in self.parts:
            copy_bytes(memory[start : start + part.numel()], part)


@dataclass(slots=True)
class _ViewedVersion:
    """A version that lies in its senders' memory, who want it back."""

    stream: Stream
    manifest: Manifest
    committed: bool | None = None
    """Whether it serves or was given up; None before either."""

    @property
    def version(self) -> int:
        return self.manifest.version

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of its tensors by name."""
        return self.stream.views(self.manifest)


class Staging:
    """Two slots of its own at most, and at times a version in its sender's memory. Thread-safe.

    One slot is filled while the other holds the version that serves, for as long as memory allows. They change roles when a
    version has committed, so that memory which somebody is loading, or which a rollback would need, is never filled. A version
    that lies in its sender's memory needs no slot until it serves; then it is copied into one (`settle`). A delta turns what is
    kept into the version that it leads to, and back if that is given up.

    Args:
        part: Name of the owner for error messages.
        limit_bytes: Most memory the slots may take together; 0 means no limit.
        device: Where they lie.
        hand_out: What `take` gives of a version's tensors.
        live: The runtime of the device of the live model, to which versions are copied from here.
    """

    def __init__(
        self,
        part: str,
        limit_bytes: int,
        device: torch.device,
        hand_out: HandOut = lambda _manifest, tensors: tensors,
        live: DeviceRuntime | None = None,
    ) -> None:
        self._part = part
        self._hand_out = hand_out
        self._limit = limit_bytes
        self._device = device
        self._runtime = runtime_of(device)
        self._live = live or self._runtime
        self._lock = threading.Lock()
        self._incoming = self._empty()
        self._serving = self._empty()
        self._lent: _ViewedVersion | None = None
        self._delta: StagedDelta | None = None
        """The delta that turned the serving slot into a version that does not serve yet; it turns the slot back, too."""
        self._delta_aborted = False
        self._base_manifest: Manifest | None = None
        """Of what it turns the slot back into."""
        self._taken: int | None = None
        self._committed = -1
        """The version that serves; what is kept may be an older one."""

    def kept_identity(self, plan: str) -> str:
        """Which publication is kept in the slices of `plan`; empty when none is, or it is unknown which."""
        with self._lock:
            if self._delta is not None:
                return ""
            lent = self._lent
            kept = lent if lent is not None and self._keeps(lent) else self._serving  # `settle` is about to copy it
            fits = kept.manifest is not None and kept.manifest.plan == plan
            return kept.manifest.identity if kept.manifest is not None and fits else ""

    def forget_kept(self) -> None:
        """The version that serves need not be kept any more."""
        with self._lock:
            if self._taken is None:
                self._delta = None  # there is nothing to take it back from
                self._serving = self._empty()

    def _keeps(self, lent: _ViewedVersion) -> bool:
        return bool(lent.committed) and not 0 < self._limit < lent.stream.nbytes

    def reserve(self, manifest: Manifest, *, lent: bool = False) -> None:
        """Make ready for a version; what was staged before and has not committed is dropped.

        With `lent` it is going to lie in its sender's memory. A delta is received in memory of its own.

        Raises `StagingMemoryError` when it would need more than the limit, or `CommitError` while an earlier version is still
        being loaded.
        """
        needed = 0 if lent else _DELTA_FACTOR * manifest.wire_bytes if manifest.is_delta else manifest.total_bytes
        if self._limit and needed > self._limit:
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
            self._incoming.manifest = None
            self._take_back()
            if self._lent is not None and self._lent.committed is None:
                self._lent = None
            if lent or manifest.is_delta:
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

    def bucket(self, nbytes: int) -> torch.Tensor:
        """Memory for a piece of a delta, uint8; its owner's alone."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def complete(self, manifest: Manifest, lent: Stream | None = None) -> None:
        """Everything has arrived and was verified: in `memory`, or in the sender's memory `lent`."""
        with self._lock:
            if lent is None:
                self._incoming.manifest = manifest
            else:
                self._lent = _ViewedVersion(lent, manifest)

    def apply(self, delta: StagedDelta) -> None:
        """Turn the version that is kept into the one that `delta` leads to.

        Raises `DeltaBaseError` when another is kept, or none.
        """
        with self._lock:
            kept = self._serving.manifest
            if kept is None or self._delta is not None or not _is_base(kept, delta.manifest):
                raise lacks_base(delta.manifest, self._part, "nothing" if kept is None else f"version {kept.version}")
            delta = delta.to(self._device)
            tensors, self._serving.manifest = self._serving.tensors(), None  # a mixture, should it stop half-way
            delta.swap_staged(tensors)
            self._runtime.finish()  # whoever loads the version does so on another stream
            self._serving.manifest, self._delta, self._delta_aborted = delta.as_dense, delta, False
            self._base_manifest = kept

    def _take_back(self) -> None:
        """Undo a delta that did not commit."""
        delta, self._delta = self._delta, None
        if delta is not None:
            tensors, self._serving.manifest = self._serving.tensors(), None
            delta.swap_staged(tensors)
            self._runtime.finish()
            self._serving.manifest = self._base_manifest

    def take(self, version: int) -> Mapping[str, torch.Tensor]:
        """Views of the staged tensors of `version`; `CommitError` if it is not staged."""
        with self._lock:
            if self._delta is not None and self._delta.version == version and not self._delta_aborted:
                self._taken = version
                return self._handed_out(self._serving)
            staged: list[_StagingSlot | _ViewedVersion] = [self._incoming]
            if self._lent is not None and self._lent.committed is None:
                staged.insert(0, self._lent)
            for slot in staged:
                if slot.version == version:
                    self._taken = version
                    return self._handed_out(slot)
            newest = max(slot.version for slot in staged)
            have = f"version {newest}" if newest >= 0 else "nothing"
        raise CommitError(
            f"version {version} is not staged here ({have} is).",
            part=self._part,
            hint="Commit a version only after the coordinator reports it staged.",
        )

    def _handed_out(self, slot: _StagingSlot | _ViewedVersion) -> Mapping[str, torch.Tensor]:
        assert slot.manifest is not None
        return self._hand_out(slot.manifest, slot.tensors())

    def take_previous(self, version: int) -> tuple[int, Mapping[str, torch.Tensor]]:
        """The version kept from before `version`, and its tensors; `CommitError` if there is none."""
        with self._lock:
            if self._delta is not None and self._delta.version == version:
                self._take_back()
            kept = self._serving.version
            if self._serving.manifest is None or kept >= version or kept != self._committed:
                raise CommitError(
                    f"the version before {version} is not kept here.",
                    part=self._part,
                    hint="It is where rollout.staging_limit_bytes leaves room for it, from the second version on.",
                )
            self._taken = self._serving.version
            return self._serving.version, self._handed_out(self._serving)

    def release(self, version: int) -> None:
        """Whoever took `version` is done with its memory."""
        with self._lock:
            if self._taken == version:
                self._taken = None

    def commit(self, version: int) -> None:
        """`version` serves: keep it, and give the memory of the one before for the next. A lent one waits for `settle`."""
        with self._lock:
            self._committed = version
            if self._delta is not None and self._delta.version == version:
                self._delta = None
                return
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
            if self._lent is not None and self._lent.version == version and self._lent.committed is None:
                self._lent.committed = False
            if self._delta is not None and self._delta.version == version:
                self._delta_aborted = True
                if self._taken != version:
                    self._take_back()
            if self._incoming.version == version:
                self._incoming.manifest = None

    def settle(self, version: int, *, scatters: bool = False) -> bool:
        """Whether nobody here needs the sender's memory of `version` any more; if it serves, it is copied first.

        Not if deltas follow and whoever commits `scatters` them into the live weights. Call it after `release`, `commit` and
        `abort`, from one thread.
        """
        with self._lock:
            if self._delta is not None and self._delta_aborted and self._taken is None:
                self._take_back()
            lent = self._lent
            if lent is None or lent.version != version:
                return True
            if lent.committed is None or self._taken == version:
                return False
            serving = None
            deltas_follow = bool(lent.manifest.identity)
            if self._keeps(lent) and self._taken is None and not (scatters and deltas_follow):
                serving = self._serving
                serving.manifest = None
        if serving is not None and serving.data.numel() < lent.stream.nbytes:
            serving = self._serving = self._empty()  # the old memory goes before the new one comes
            try:
                serving = self._serving = self._room(lent.stream.nbytes)
            except (RuntimeError, MemoryError) as error:
                serving = None
                _log.warning("%s: version %d is not kept, there is no memory for it: %s", self._part, version, error)
        if serving is not None:
            lent.stream.copy_to(serving.data)
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
            if self._delta is not None and self._taken != self._delta.version:
                self._take_back()
            if self._lent is not None and self._lent.committed is None and self._taken != self._lent.version:
                self._lent = None

    def close(self) -> None:
        """Let go of all memory; whoever still looks at some keeps that alive."""
        with self._lock:
            self._incoming, self._serving, self._lent, self._delta = self._empty(), self._empty(), None, None

    def _empty(self) -> _StagingSlot:
        return _StagingSlot(torch.empty(0, dtype=torch.uint8, device=self._device))

    def _room(self, nbytes: int) -> _StagingSlot:
        if self._live.has_streams:
            return self._new(nbytes)
        return _StagingSlot(torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def _new(self, nbytes: int) -> _StagingSlot:
        return _StagingSlot(new_memory(nbytes, self._device, self._live))


def new_memory(nbytes: int, device: torch.device, live: DeviceRuntime) -> torch.Tensor:
    """Memory on `device` for what is received, 1-D uint8, from which it is copied to the device of `live`."""
    # Filled once: first-touch page faults would otherwise land in the middle of the first version.
    if device == HOST:
        return live.host_memory(nbytes)
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    runtime_of(device).finish()  # it is filled on other streams, which do not wait for the zeros
    return memory


def _is_base(kept: Manifest, delta: Manifest) -> bool:
    return kept.identity == delta.base_identity and kept.plan == delta.plan


def lacks_base(manifest: Manifest, part: str, have: str) -> DeltaBaseError:
    """The refusal of a delta."""
    return DeltaBaseError(
        f"version {manifest.version} is a delta to version {manifest.base_version} ({manifest.base_identity}), {have} is here.",
        part=part,
        hint="The coordinator has the version sent in full then.",
    )
