"""The choice of a version's codec: as configured, or with `auto` the codec that is expected to be faster."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from ..config import CodecPolicy
from ..version.manifest import CODEC_DELTA, CODEC_DENSE
from .delta_time import MEASURED, DeltaTime

_BUDGET = 0.01
"""Share of all time that probing the slower codec may cost."""
_SELDOM = 10
"""Least number of versions between two probes of the slower codec."""
_WORTH_A_TRY = 3.0
"""Deltas are measured unless they are guessed to take this many times as long as dense versions."""
_IN_VAIN = 3
_PAUSE = 50
"""After so many deltas in a row that were sent dense after all, so many versions are sent dense without a try."""
_CAPACITY = 0.5
"""Share of the dense bytes that a delta may take; longer ones are sent dense."""
_POSITION_BYTES = 1.0
"""Bytes of a changed element's position on the wire, about."""
_PER_CHANGE = 100.0
"""Guess, before a delta is measured: time to encode, decode and write a changed element, over that to snapshot an element. It is
low, so that deltas are tried."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The codec of a version, and the reason for it."""

    codec: str
    reason: str


class CodecChooser:
    """Chooses the codec of each version, and learns from the time that each took. Thread-safe.

    The time of a version is that from the beginning of its snapshot to its commit, without the wait of an offered version for the
    rollouts. With `auto`, first a few versions are sent dense, then a few as deltas if these may be faster, and then the codec
    with the lower expected time. The other one is probed again when it was not used for so long that the probe costs little,
    because links and machines change.

    Args:
        policy: The user's configuration.
        elements: Number of elements that this rank sends.
        dense_bytes: Bytes of these elements.
        full_every: Number of versions of which at least one is sent dense.
        clock: Returns seconds.
    """

    def __init__(
        self,
        policy: CodecPolicy,
        elements: int,
        dense_bytes: int,
        full_every: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._policy = policy
        self._elements = elements
        self._dense_bytes = dense_bytes
        self._full_every = full_every
        self._clock = clock
        self._lock = Lock()
        # Versions sent since the last one of each codec.
        self._since = {CODEC_DENSE: 0, CODEC_DELTA: 0}
        self._current = CODEC_DENSE
        self._chosen = CODEC_DENSE
        # Versions chosen as deltas and sent dense, since the last delta.
        self._in_vain = 0
        self._snapshot_s = 0.0
        self._dense_seen = 0
        self._dense: deque[float] = deque(maxlen=MEASURED)
        self._delta = DeltaTime()
        # Seconds and density of the newest encoded delta.
        self._encoded = (0.0, 0.0)
        # Version, codec, seconds so far, and the time at which these were taken.
        self._sent: tuple[int, str, float, float] | None = None

    @property
    def uses_deltas(self) -> bool:
        """Whether there can be deltas."""
        return self._policy != CODEC_DENSE

    @property
    def wants_density(self) -> bool:
        """Whether `choose` uses the density."""
        with self._lock:
            if self._policy != "auto" or self._dense_seen < MEASURED:
                return False
            return not self._is_hopeless(self._delta.fixed_s)

    @property
    def capacity_bytes(self) -> int:
        """Limit for the bytes of a delta."""
        return int(self._dense_bytes * _CAPACITY)

    def choose(self, density: float | None, *, has_base: bool) -> Choice:
        """Choose the codec of the next version; `density` is the expected share of changed elements, if it was sampled."""
        with self._lock:
            choice = self._choice(density, has_base=has_base)
            self._chosen = choice.codec
            return choice

    def _choice(self, density: float | None, *, has_base: bool) -> Choice:
        if not self.uses_deltas:
            return Choice(CODEC_DENSE, "asked for")
        if not has_base:
            return Choice(CODEC_DENSE, "the receivers have no version that a delta could apply to")
        if self._since[CODEC_DENSE] + 1 >= self._full_every:
            return Choice(CODEC_DENSE, f"every {self._full_every} versions one is sent in full")
        if self._policy == CODEC_DELTA:
            return Choice(CODEC_DELTA, "asked for")
        return self._by_time(density)

    def _by_time(self, density: float | None) -> Choice:
        if self._dense_seen < MEASURED:
            return Choice(CODEC_DENSE, "dense is being measured")
        if self._in_vain >= _IN_VAIN and self._since[CODEC_DELTA] % _PAUSE:
            return Choice(CODEC_DENSE, "the last deltas had to be sent in full")
        dense_s = self._dense_s
        # The guess takes all of a dense version's time for transfer, as at worst it is.
        per_density_s = _PER_CHANGE * self._snapshot_s + dense_s * self.wire_bytes(1.0) / max(self._dense_bytes, 1)
        self._delta.guess(self._snapshot_s, per_density_s)
        if density is None:
            self._current = CODEC_DENSE
            fixed_s = _ms(self._delta.fixed_s)
            return Choice(
                CODEC_DENSE, f"without any change, a delta is expected to take {fixed_s}, dense {_ms(dense_s)}"
            )
        delta_s = self._delta.at(density)
        reason = f"{density:.2%} changed: a delta is expected to take {_ms(delta_s)}, dense {_ms(dense_s)}"
        if self.wire_bytes(density) > self.capacity_bytes:
            self._current = CODEC_DENSE
            return Choice(CODEC_DENSE, f"{reason}, and too many bytes")
        if not self._delta.known and delta_s < _WORTH_A_TRY * dense_s:
            return Choice(CODEC_DELTA, f"{reason}; deltas are being measured")
        return self._faster_or_probe(dense_s, delta_s, reason)

    def _faster_or_probe(self, dense_s: float, delta_s: float, reason: str) -> Choice:
        slower, self._current = (CODEC_DELTA, CODEC_DENSE) if dense_s <= delta_s else (CODEC_DENSE, CODEC_DELTA)
        loss = abs(dense_s - delta_s) / max(min(dense_s, delta_s), 1e-9)
        if self._is_due(slower, loss):
            return Choice(slower, f"{reason}; {slower} is measured again")
        return Choice(self._current, reason)

    @property
    def _dense_s(self) -> float:
        return statistics.median_low(self._dense)

    def _is_due(self, codec: str, loss: float) -> bool:
        """Whether to probe `codec`, which takes longer by the share `loss`."""
        return self._since[codec] >= _SELDOM and self._since[codec] * _BUDGET > loss

    def _is_hopeless(self, delta_s: float) -> bool:
        """Whether no delta is sent that takes at least this long."""
        if not self._delta.known:
            return delta_s >= _WORTH_A_TRY * self._dense_s
        loss = delta_s / self._dense_s - 1
        return self._current == CODEC_DENSE and loss > 0 and not self._is_due(CODEC_DELTA, loss)

    def wire_bytes(self, density: float) -> float:
        """Expected length of a delta."""
        itemsize = self._dense_bytes / max(self._elements, 1)
        return density * self._elements * (itemsize + _POSITION_BYTES)

    def snapshot_taken(self, seconds: float) -> None:
        """Note the time of a snapshot."""
        with self._lock:
            self._snapshot_s = seconds

    def encoded(self, seconds: float, density: float) -> None:
        """Note the time of a delta from the beginning of its snapshot until it was encoded."""
        with self._lock:
            self._encoded = (seconds, density)

    def sent(self, version: int, codec: str, seconds: float) -> None:
        """Note the time that sending took."""
        with self._lock:
            for other in self._since:
                self._since[other] += 1
            self._since[codec] = 0
            if codec == CODEC_DELTA:
                self._in_vain = 0
            elif self._chosen == CODEC_DELTA:
                self._in_vain += 1
            before_s = self._encoded[0] if codec == CODEC_DELTA else 0.0
            self._sent = (version, codec, before_s + seconds, self._clock())

    def committed(self, version: int) -> None:
        """Learn from the time of a version that was sent and serves now."""
        with self._lock:
            if self._sent is None or self._sent[0] != version:
                return
            _, codec, seconds, at = self._sent
            self._sent = None
            seconds += self._clock() - at
            if codec == CODEC_DELTA:
                self._delta.learn(self._encoded[1], seconds)
                return
            self._dense_seen += 1
            if self._dense_seen > 1:  # sender and receivers touch memory for the first one for the first time
                self._dense.append(seconds)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
