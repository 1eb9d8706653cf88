"""What fails in a run without ending it: samples and optimizer steps, each counted, told of, and bounded in number."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from weightlane.ckpt_engines import TooManyFailuresError, WeightlaneError
from weightlane.plugins import RunHooks

STEP = "step"
"""The kind of an optimizer step that changed nothing. Every other kind costs a sample."""
_WINDOW = {True: 20, False: 100}
"""Of how many of the last steps, or samples, a share may fail."""


class Failures:
    """Of one run.

    Args:
        share: Share of the last 100 samples, or of the last 20 steps, that may fail. Those that a young run has not had yet
            count as well.
        hooks: Told of each that fails.
    """

    def __init__(self, share: float, hooks: RunHooks) -> None:
        self._share = share
        self._hooks = hooks
        self._last = {of_steps: deque[bool]([True] * size, size) for of_steps, size in _WINDOW.items()}
        self.counts: Counter[str] = Counter()
        """How many have failed, by kind."""

    def well(self, kind: str = "") -> None:
        """A sample, or a step, has come out well."""
        self._last[kind == STEP].append(True)

    def failed(self, kind: str, error: WeightlaneError, count: int = 1, **facts: Any) -> None:
        """`count` samples, or a step, are lost to `error`; `facts` say which.

        Raises `TooManyFailuresError` when that is one too many.
        """
        self.counts[kind] += count
        self._hooks.item_failed(kind=kind, facts={"error": str(error), "count": count, **facts})
        of_steps = kind == STEP
        last = self._last[of_steps]
        last.extend([False] * count)
        lost = last.count(False)
        if lost > self._share * _WINDOW[of_steps]:
            what = "optimizer steps" if of_steps else "samples"
            raise TooManyFailuresError(
                f"{lost} of the last {_WINDOW[of_steps]} {what} failed; the last one: {error}",
                part="loop",
                hint="failures.jsonl in the run's directory lists them; loop.max_failed_share says how many may fail.",
            ) from error
