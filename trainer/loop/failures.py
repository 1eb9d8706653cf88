"""Samples and optimizer steps that fail without ending the run: each is counted and reported, and too many end it."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from weightlane.ckpt_engines import TooManyFailuresError, WeightlaneError
from weightlane.plugins import RunHooks

STEP = "step"
"""The kind of an optimizer step that changed nothing. Every other kind costs a sample."""
_STEPS, _SAMPLES, _GROUPS = 20, 100, 20
"""Windows over which the share of failures is measured: the last steps; the last samples, or those of the last groups if more."""


class Failures:
    """Counts the failed samples and steps of one run.

    `share` of the last 20 steps, or of the samples of the last 20 groups of `group_size` (100 samples at least), may fail; those
    that a young run has not had yet count as successes. `setting` is the configuration key of `share`.
    """

    def __init__(
        self, share: float, hooks: RunHooks, group_size: int = 1, setting: str = "loop.max_failed_share"
    ) -> None:
        self._share, self._setting = share, setting
        self._hooks = hooks
        windows = {True: _STEPS, False: max(_SAMPLES, _GROUPS * group_size)}
        self._last = {of_steps: deque[bool]([True] * size, size) for of_steps, size in windows.items()}
        self.counts: Counter[str] = Counter()
        """Number of failures, by kind."""

    def well(self, kind: str = "") -> None:
        """Count a sample, or a step, that succeeded."""
        self._last[kind == STEP].append(True)

    def failed(self, kind: str, error: WeightlaneError, count: int = 1, *, may_end: bool = True, **facts: Any) -> None:
        """Count `count` samples, or a step, that are lost to `error`; `facts` identify them.

        With `may_end`, they also count towards the share that may fail. Raises `TooManyFailuresError` if it is exceeded.
        """
        self.counts[kind] += count
        self._hooks.item_failed(kind=kind, facts={"error": str(error), "count": count, **facts})
        if not may_end:
            return
        of_steps = kind == STEP
        last = self._last[of_steps]
        last.extend([False] * count)
        lost = last.count(False)
        if lost > self._share * len(last):
            what = "optimizer steps" if of_steps else "samples"
            raise TooManyFailuresError(
                f"{lost} of the last {len(last)} {what} failed; the last one: {error}",
                part="loop",
                hint=f"failures.jsonl in the run's directory lists them; {self._setting} says how many may fail.",
            ) from error
