"""Whether a version is sent in full or as a delta: by order, or by which is expected to be there sooner."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from ..config import CodecPolicy
from ..version.manifest import CODEC_DELTA, CODEC_DENSE

_BETTER_BY = 0.03
"""How much sooner the other codec must be expected for a change."""
_BUDGET = 0.01
"""What trying the codec that is expected to be slower may cost, as a share of everything."""
_SELDOM = 10
"""At most every so many versions it is tried."""
_FIRST_DENSE, _FIRST_DELTAS = 3, 3
"""Versions that are sent by a codec before it is believed to be known."""
_WORTH_A_TRY = 3.0
"""Deltas are measured where they are guessed to take less than so many times what dense does."""
_IN_VAIN = 3
_PAUSE = 50
"""After so many deltas in a row that were sent in full after all, refused or too large, none is tried for so many versions."""
_KEPT = 3
"""Dense versions of which the median is taken."""
_NEWEST = 0.5
"""How far an expectation of a delta moves to what the newest one took."""
_NEAR, _FEW = 2.0, 1e-4
"""Densities within this factor are alike, and those below this one."""
_LEAST = 0.1
"""An expectation falls at most to this share of itself at once."""
_CAPACITY = 0.5
"""A delta that takes more than this share of the dense bytes is not sent."""
_POSITION_BYTES = 1.0
"""What a position costs on the wire, near enough."""
_COMPARE = 2.0
"""Seconds that a delta without changes takes per second of snapshot, before one was measured."""
_PER_CHANGE = 100.0
"""How many times longer it takes to encode, decode and write an element that changed than to snapshot one, before a delta was
measured; low, so that it is tried."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a version is sent as, and why."""

    codec: str
    reason: str


class _DeltaTime:
    """How long deltas take: a fixed time, and one in proportion to the density.

    The first delta does not count, as both sides touch memory for it for the first time; of the next two the faster one does.
    What a delta took other than expected is put down to the two parts by the squares of their shares in what was expected, as for
    two quantities whose errors are in proportion to them: deltas of few changes teach the first part, those of many the second.
    """

    def __init__(self) -> None:
        self.fixed_s = 0.0
        self._per_density_s = 0.0
        self._seen = 0
        self._density = 0.0

    @property
    def known(self) -> bool:
        """Whether it is more than a guess."""
        return self._seen >= _FIRST_DELTAS

    def guess(self, fixed_s: float, per_density_s: float) -> None:
        """What to expect until deltas are measured."""
        if self._seen <= 1:
            self.fixed_s, self._per_density_s = fixed_s, per_density_s

    def at(self, density: float) -> float:
        """Seconds expected."""
        return self.fixed_s + self._per_density_s * density

    def learn(self, density: float, seconds: float) -> None:
        """A delta took so long."""
        self._seen += 1
        expected = self.at(density)
        if self._seen == 1 or expected <= 0:
            return
        error = seconds - expected
        if self._seen == _FIRST_DELTAS:
            error = min(error, 0.0)
        elif self._seen > _FIRST_DELTAS and self._is_near(density):
            error = _NEWEST * min(error, expected)
        self._density = density
        of_changes = self._per_density_s * density / expected
        fixed = (1 - of_changes) ** 2 / ((1 - of_changes) ** 2 + of_changes**2)
        self.fixed_s = max(self.fixed_s + error * fixed, self.fixed_s * _LEAST)
        if density > 0:
            per_density_s = self._per_density_s + error * (1 - fixed) / density
            self._per_density_s = max(per_density_s, self._per_density_s * _LEAST)

    def _is_near(self, density: float) -> bool:
        """Whether a density like this was learnt from last, so that an exception can be told from the rule."""
        low, high = sorted((max(self._density, _FEW), max(density, _FEW)))
        return high <= _NEAR * low


class CodecChooser:
    """Decides for each version, and learns from each. Thread-safe.

    What counts is how long versions took, from the snapshot's beginning to the commit, without the wait of an offered version for
    the rollouts. Snapshot, comparison, link and commit are all in that, however they overlap. Some versions are sent in full
    first, then some as deltas if these may be faster, and then whichever is expected to be there sooner. The other one is tried
    again when it has not been seen for so long that this costs little even if it turns out as slow as expected: links and
    machines change.

    Args:
        policy: What the user asked for.
        elements: Elements this rank sends.
        dense_bytes: Their bytes on the wire.
        full_every: At the latest every so many versions one is sent in full.
        clock: Seconds.
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
        self._since = {CODEC_DENSE: 0, CODEC_DELTA: 0}
        """Versions sent since one of each codec was."""
        self._current = CODEC_DENSE
        self._chosen = CODEC_DENSE
        """For the newest version."""
        self._in_vain = 0
        """Deltas since the last one that was sent as such."""
        self._snapshot_s = 0.0
        self._dense_seen = 0
        self._dense: deque[float] = deque(maxlen=_KEPT)
        self._delta = _DeltaTime()
        self._encoded = (0.0, 0.0)
        """Seconds and density of the delta that was encoded last."""
        self._sent: tuple[int, str, float, float] | None = None
        """Version, codec, seconds so far, and when."""

    @property
    def uses_deltas(self) -> bool:
        """Whether there can be any."""
        return self._policy != CODEC_DENSE

    @property
    def wants_density(self) -> bool:
        """Whether `choose` goes by it."""
        with self._lock:
            if self._policy != "auto":
                return False
            if self._dense_seen < _FIRST_DENSE:
                return False
            return not self._is_hopeless(self._delta.fixed_s)

    @property
    def capacity_bytes(self) -> int:
        """What a delta may take at most."""
        return int(self._dense_bytes * _CAPACITY)

    def choose(self, density: float | None, *, has_base: bool) -> Choice:
        """What the next version is sent as; `density` is the expected share of changed elements, if it was looked at."""
        with self._lock:
            choice = self._choice(density, has_base=has_base)
            self._chosen = choice.codec
            return choice

    def _choice(self, density: float | None, *, has_base: bool) -> Choice:
        if not self.uses_deltas:
            return Choice(CODEC_DENSE, "asked for")
        if not has_base:
            return Choice(CODEC_DENSE, "nothing is known to be there that a delta could apply to")
        if self._since[CODEC_DENSE] + 1 >= self._full_every:
            return Choice(CODEC_DENSE, f"every {self._full_every} versions one is sent in full")
        if self._policy == CODEC_DELTA:
            return Choice(CODEC_DELTA, "asked for")
        return self._by_time(density)

    def _by_time(self, density: float | None) -> Choice:
        if self._dense_seen < _FIRST_DENSE:
            return Choice(CODEC_DENSE, "dense is being measured")
        if self._in_vain >= _IN_VAIN and self._since[CODEC_DELTA] % _PAUSE:
            return Choice(CODEC_DENSE, "the last deltas had to be sent in full")
        dense_s = self._dense_s
        # At worst, all of a dense version's time is transfer.
        per_density_s = _PER_CHANGE * self._snapshot_s + dense_s * self.wire_bytes(1.0) / max(self._dense_bytes, 1)
        self._delta.guess(_COMPARE * self._snapshot_s, per_density_s)
        if density is None:
            self._current = CODEC_DENSE
            said = f"without any change, a delta is expected to take {_ms(self._delta.fixed_s)}, dense {_ms(dense_s)}"
            return Choice(CODEC_DENSE, said)
        delta_s = self._delta.at(density)
        said = f"{density:.2%} changed: a delta is expected to take {_ms(delta_s)}, dense {_ms(dense_s)}"
        if self.wire_bytes(density) > self.capacity_bytes:
            self._current = CODEC_DENSE
            return Choice(CODEC_DENSE, f"{said}, and too many bytes")
        if not self._delta.known and delta_s < _WORTH_A_TRY * dense_s:
            return Choice(CODEC_DELTA, f"{said}; deltas are being measured")
        return self._faster(delta_s, dense_s, said)

    def _faster(self, delta_s: float, dense_s: float, said: str) -> Choice:
        """Whichever is expected to take less, if the difference is worth a change; or the other one, to measure it."""
        expected = {CODEC_DENSE: dense_s, CODEC_DELTA: delta_s}
        other = CODEC_DENSE if self._current == CODEC_DELTA else CODEC_DELTA
        if expected[other] < expected[self._current] * (1 - _BETTER_BY):
            self._current, other = other, self._current
        if self._is_due(other, expected[other] / expected[self._current] - 1):
            return Choice(other, f"{said}; {other} is measured again")
        return Choice(self._current, said)

    @property
    def _dense_s(self) -> float:
        return statistics.median_low(self._dense)

    def _is_due(self, codec: str, loss: float) -> bool:
        """Whether to send a version by `codec`, at a loss of that share, just to see."""
        return self._since[codec] >= _SELDOM and self._since[codec] * _BUDGET > loss

    def _is_hopeless(self, delta_s: float) -> bool:
        """Whether no delta is sent if it takes at least so long."""
        if not self._delta.known:
            return delta_s >= _WORTH_A_TRY * self._dense_s
        loss = delta_s / self._dense_s - 1
        return self._current == CODEC_DENSE and loss > 0 and not self._is_due(CODEC_DELTA, loss)

    def wire_bytes(self, density: float) -> float:
        """About how long a delta is."""
        itemsize = self._dense_bytes / max(self._elements, 1)
        return density * self._elements * (itemsize + _POSITION_BYTES)

    def snapshot_taken(self, seconds: float) -> None:
        """A snapshot took so long."""
        with self._lock:
            self._snapshot_s = seconds

    def encoded(self, seconds: float, density: float) -> None:
        """A delta of that density took so long from the beginning of its snapshot."""
        with self._lock:
            self._encoded = (seconds, density)

    def sent(self, version: int, codec: str, seconds: float) -> None:
        """A version's bytes took so long."""
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
        """A version that was sent serves now."""
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
            if self._dense_seen > 1:  # both sides touch memory for the first one for the first time
                self._dense.append(seconds)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
