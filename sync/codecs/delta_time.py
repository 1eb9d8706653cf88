"""The time that a delta is expected to take, learned from the deltas before."""

from __future__ import annotations

MEASURED = 3
"""Versions of one codec after which its time counts as known, and dense versions of which the median is taken."""
_NEWEST = 0.5
"""Weight of the newest delta in the expected time. At 1, one slow version would change the choice."""
_LEAST = 0.1
"""Limit for the fall of an expected time after one delta: to this share of itself."""


class DeltaTime:
    """Expects a fixed time, and a time in proportion to the density.

    The first delta does not count, because sender and receivers touch memory for the first time. The difference between a delta's
    time and the expected time is divided between the two parts by the squares of their shares in the expected time, as for two
    quantities with errors in proportion to them. So deltas with few changes correct the first part, and dense ones the second.
    """

    def __init__(self) -> None:
        self.fixed_s = 0.0
        self._per_density_s = 0.0
        self._seen = 0

    @property
    def known(self) -> bool:
        """Whether enough deltas were measured."""
        return self._seen >= MEASURED

    def guess(self, fixed_s: float, per_density_s: float) -> None:
        """Set the expected time, unless a delta was measured."""
        if self._seen <= 1:
            self.fixed_s, self._per_density_s = fixed_s, per_density_s

    def at(self, density: float) -> float:
        """Expected seconds at this density."""
        return self.fixed_s + self._per_density_s * density

    def learn(self, density: float, seconds: float) -> None:
        """Correct the expected time by a measured delta."""
        self._seen += 1
        expected = self.at(density)
        if self._seen == 1 or expected <= 0:
            return
        error = seconds - expected
        if self._seen >= MEASURED:
            error = _NEWEST * min(error, expected)
        proportional = self._per_density_s * density / expected
        fixed = (1 - proportional) ** 2 / ((1 - proportional) ** 2 + proportional**2)
        self.fixed_s = max(self.fixed_s + error * fixed, self.fixed_s * _LEAST)
        if density > 0:
            per_density_s = self._per_density_s + error * (1 - fixed) / density
            self._per_density_s = max(per_density_s, self._per_density_s * _LEAST)
