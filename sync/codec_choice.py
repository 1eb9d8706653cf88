"""Whether a version is sent in full or as a delta: by order, or by which is expected to be there sooner."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from .config import CodecPolicy
from .manifest import CODEC_DELTA, CODEC_DENSE

_NEWEST = 0.5
"""Weight of the newest measurement in a running mean."""
_BETTER_BY = 0.05
"""How much sooner the other codec must be expected for a change."""
_TELLING_S = 0.02
"""A transfer must take so long to say something about the link."""
_CAPACITY = 0.5
"""A delta that takes more than this share of the dense bytes is not sent."""
_POSITION_BYTES = 1.0
"""What a position costs on the wire, near enough."""
_DEFAULT_ENCODE = 2.0
"""Seconds that encoding takes per second of snapshot, before it was ever measured."""
_DENSITY_COST = 10.0
"""By how much of itself encoding takes longer if everything changed, before it was measured at two densities."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a version is sent as, and why."""

    codec: str
    reason: str


class CodecChooser:
    """Decides for each version, and learns from each. Thread-safe.

    A dense version is expected to be there when its snapshot is taken and its bytes have crossed the link, which overlap, and it
    was committed. A delta needs the snapshot, the comparison, its own bytes, and its own commit. Each of these is measured.

    Args:
        policy: What the user asked for.
        elements: Elements this rank sends.
        dense_bytes: Their bytes on the wire.
        full_every: At the latest every so many versions one is sent in full.
    """

    def __init__(self, policy: CodecPolicy, elements: int, dense_bytes: int, full_every: int) -> None:
        self._policy = policy
        self._elements = elements
        self._dense_bytes = dense_bytes
        self._full_every = full_every
        self._lock = threading.Lock()
        self._since_full = 0
        self._current = CODEC_DENSE
        self._snapshot_s: float | None = None
        self._encode_s: float | None = None
        """Of a delta at `_encode_density`."""
        self._encode_density = 0.0
        self._link_bytes_per_s: float | None = None
        self._commit_s: dict[str, float] = {}
        self._sent_at: tuple[int, str, float] | None = None

    @property
    def uses_deltas(self) -> bool:
        """Whether there can be any."""
        return self._policy != CODEC_DENSE

    @property
    def wants_density(self) -> bool:
        """Whether `choose` goes by it."""
        return self._policy == "auto"

    @property
    def capacity_bytes(self) -> int:
        """What a delta may take at most."""
        return int(self._dense_bytes * _CAPACITY)

    def choose(self, density: float | None, *, has_base: bool) -> Choice:
        """What the next version is sent as; `density` is the expected share of changed elements, if it was looked at."""
        with self._lock:
            if not self.uses_deltas:
                return Choice(CODEC_DENSE, "asked for")
            if not has_base:
                return Choice(CODEC_DENSE, "nothing is known to be there that a delta could apply to")
            if self._since_full + 1 >= self._full_every:
                return Choice(CODEC_DENSE, f"every {self._full_every} versions one is sent in full")
            if self._policy == CODEC_DELTA or density is None:
                return Choice(CODEC_DELTA, "asked for")
            return self._by_time(density)

    def _by_time(self, density: float) -> Choice:
        dense_s, delta_s = self._expected_dense_s(), self._expected_delta_s(density)
        if delta_s is None or dense_s is None:
            return Choice(CODEC_DENSE, "nothing was measured yet")
        said = (
            f"{density:.2%} changed: a delta is expected to take {delta_s * 1e3:.0f} ms, dense {dense_s * 1e3:.0f} ms"
        )
        best, other = (delta_s, dense_s) if self._current == CODEC_DELTA else (dense_s, delta_s)
        if self.wire_bytes(density) > self.capacity_bytes:
            self._current = CODEC_DENSE
        elif other < best * (1 - _BETTER_BY):
            self._current = CODEC_DENSE if self._current == CODEC_DELTA else CODEC_DELTA
        return Choice(self._current, said)

    def wire_bytes(self, density: float) -> float:
        """About how long a delta is."""
        itemsize = self._dense_bytes / max(self._elements, 1)
        return density * self._elements * (itemsize + _POSITION_BYTES)

    def _expected_dense_s(self) -> float | None:
        if self._snapshot_s is None or CODEC_DENSE not in self._commit_s:
            return None
        return max(self._snapshot_s, self._transfer_s(self._dense_bytes)) + self._commit_s[CODEC_DENSE]

    def _expected_delta_s(self, density: float) -> float | None:
        if self._snapshot_s is None:
            return None
        if self._encode_s is None:
            encode_s = _DEFAULT_ENCODE * self._snapshot_s * (1 + _DENSITY_COST * density)
        else:
            encode_s = self._encode_s * (1 + _DENSITY_COST * density) / (1 + _DENSITY_COST * self._encode_density)
        commit_s = self._commit_s.get(CODEC_DELTA, self._commit_s.get(CODEC_DENSE, 0.0))
        return max(self._snapshot_s, encode_s) + self._transfer_s(self.wire_bytes(density)) + commit_s

    def _transfer_s(self, nbytes: float) -> float:
        return nbytes / self._link_bytes_per_s if self._link_bytes_per_s else 0.0

    def snapshot_taken(self, seconds: float) -> None:
        """A snapshot took so long."""
        with self._lock:
            self._snapshot_s = _mean(self._snapshot_s, seconds)

    def encoded(self, seconds: float, density: float) -> None:
        """A delta of that density took so long from the beginning of its snapshot."""
        with self._lock:
            self._encode_s, self._encode_density = seconds, density

    def sent(self, version: int, codec: str, nbytes: int, seconds: float) -> None:
        """A version's bytes took so long."""
        with self._lock:
            self._since_full = 0 if codec == CODEC_DENSE else self._since_full + 1
            self._sent_at = (version, codec, time.perf_counter())
            # While the snapshot is being taken the link may have been waiting for it.
            waited_s = (self._snapshot_s or 0.0) if codec == CODEC_DENSE else 0.0
            if seconds > max(_TELLING_S, 1.2 * waited_s):
                self._link_bytes_per_s = _mean(self._link_bytes_per_s, nbytes / seconds)
            elif codec == CODEC_DENSE:
                self._link_bytes_per_s = None  # faster than the snapshot

    def committed(self, version: int) -> None:
        """A version that was sent serves now."""
        with self._lock:
            if self._sent_at is not None and self._sent_at[0] == version:
                _, codec, at = self._sent_at
                self._commit_s[codec] = _mean(self._commit_s.get(codec), time.perf_counter() - at)
                self._sent_at = None


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST * (new - old)
