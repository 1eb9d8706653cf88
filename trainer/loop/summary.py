"""`RunSummary`: the figures that a run ends with; `OverlapClock`, which measures one of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from .sampling.tally import SampleTally
from .version_keeper import SyncTime, SyncTimes

ACCURACY = "accuracy"
"""Fact of an evaluation: the mean greedy reward."""


class OverlapClock:
    """Adds up the wall time in which at least two activities are busy."""

    def __init__(self) -> None:
        self._busy: Counter[str] = Counter()
        self.restart()

    def restart(self) -> None:
        """Reset all sums. Busy activities stay busy."""
        self._started = self._changed = time.perf_counter()
        self._together = 0.0

    def wall_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    @contextmanager
    def busy(self, activity: str) -> Iterator[None]:
        """Mark `activity` as busy; several may nest or overlap."""
        self._settle()
        self._busy[activity] += 1
        try:
            yield
        finally:
            self._settle()
            self._busy[activity] -= 1

    def share_together(self) -> float:
        """Share of the wall time since the start in which at least two activities were busy."""
        self._settle()
        wall = self._changed - self._started
        return self._together / wall if wall > 0 else 0.0

    def _settle(self) -> None:
        now = time.perf_counter()
        if sum(count > 0 for count in self._busy.values()) > 1:
            self._together += now - self._changed
        self._changed = now


class Quantiles(NamedTuple):
    """Median, 95th percentile and maximum of a series of seconds; zeros for an empty one."""

    p50: float
    p95: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Nearest-rank quantiles."""
        if not values:
            return cls(0.0, 0.0, 0.0)
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(ordered[round(0.5 * last)], ordered[round(0.95 * last)], ordered[last])


@dataclass(slots=True)
class RunSummary:
    """The figures of ``summary.json``, which the loop fills in during a run. In seconds unless the name says otherwise."""

    times: SyncTimes
    steps: int = 0
    """Optimizer steps without those that a synchronous update followed."""
    measured_before: Mapping[str, float] | None = None
    """Facts of the evaluation before the first step (`RunHooks.evaluated`); None when nothing was measured."""
    measured_after: Mapping[str, float] | None = None
    overlap_share: float = 0.0
    """Share of the training's wall time in which a trainer and a rollout were busy at once."""
    max_token_gap_s: float = 0.0
    """Longest wait for a next token that spans a commit."""
    generated_tokens: int = 0
    """Tokens that the replicas have generated, without those that died."""
    recomputed_tokens: int = 0
    """Tokens that their requests in flight prefilled again because commits dropped their caches; 0 if caches are kept."""
    wall_s: float = 0.0
    synchronous_updates_s: list[float] = field(default_factory=list)
    """Time of each version for which the trainer waited."""
    replicas_lost: int = 0
    """Rollout replicas that died."""
    replicas_replaced: int = 0
    """Number of those replicas in whose place another one serves."""
    replicas_added: int = 0
    """Further replicas that served, because the run was scaled."""
    replicas_left: int = 0
    """Replicas that left, because the run was scaled."""
    drawn_tokens: float = 0.0
    """Mean length, in tokens, of all completions whose turn for training has come, and of those that are left out."""
    trained_tokens: float = 0.0
    """Mean length of the completions that were trained on; below `drawn_tokens` is a bias towards short ones."""
    drawn: SampleTally = field(default_factory=SampleTally)
    """Counts of drawn groups, with and without signal, and the mean reward of their completions."""
    reward_trained: float = 0.0
    """Mean reward of the completions that were trained on."""
    success_of_tasks: float | None = None
    """With a curriculum: the mean of the tasks' latest success rates."""
    dropped_groups: int = 0
    """Groups that were too stale, with ``late_groups = "drop"``."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Samples and steps that failed, by kind; see `RunHooks.item_failed`."""

    @property
    def accuracy_before(self) -> float | None:
        """Mean greedy reward on held-out tasks before the first step; None when not measured."""
        return None if self.measured_before is None else self.measured_before[ACCURACY]

    @property
    def accuracy_after(self) -> float | None:
        """The same after the last step."""
        return None if self.measured_after is None else self.measured_after[ACCURACY]

    @property
    def versions_committed(self) -> int:
        """Versions that a quorum of replicas committed, the untrained first one included."""
        return len(self.times.committed)

    @property
    def versions_aborted(self) -> int:
        """Versions that no quorum committed."""
        return len(self.times.aborted)

    @property
    def synchronous_update_s(self) -> float:
        """Time that a synchronous update costs both sides per step: the median so far; 0 if there was none."""
        return Quantiles.of(self.synchronous_updates_s).p50

    @property
    def trainer_lost_per_step_s(self) -> float:
        """Time per optimizer step that versions kept the trainer from training: publish plus fence."""
        return sum(self.times.trainer_blocked_s) / max(1, self.steps)

    @property
    def rollout_lost_per_step_s(self) -> float:
        """Time per optimizer step that versions kept replicas from decoding; the one that lost most counts for each version."""
        return sum(time.rollout_blocked_s for time in self.times.synced) / max(1, self.steps)

    def sync_quantiles(self) -> dict[str, Quantiles]:
        """Quantiles over the versions for which the trainer did not wait, by name in ``summary.json``.

        ``trainer_blocked_s`` is publish plus fence, also of aborted versions. The others are times of `SyncReport`.
        """
        return {
            "trainer_blocked_s": Quantiles.of(self.times.trainer_blocked_s),
            **{name: Quantiles.of([getattr(time, name) for time in self.times.synced]) for name in SyncTime._fields},
        }

    def samples(self) -> dict[str, Any]:
        """The figures of samples, as JSON-representable data."""
        return {
            "drawn_tokens": self.drawn_tokens,
            "trained_tokens": self.trained_tokens,
            **self.drawn.to_plain(),
            "reward_trained": self.reward_trained,
            **({} if self.success_of_tasks is None else {"success_of_tasks": self.success_of_tasks}),
            "dropped_groups": self.dropped_groups,
            "failed": dict(self.failures),
        }

    def to_plain(self) -> dict[str, Any]:
        """These figures as JSON-representable data."""
        return {
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
            "measured_before": dict(self.measured_before or {}),
            "measured_after": dict(self.measured_after or {}),
            "versions_committed": self.versions_committed,
            "overlap_share": self.overlap_share,
            "max_token_gap_s": self.max_token_gap_s,
            "generated_tokens": self.generated_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "wall_s": self.wall_s,
            "replicas_lost": self.replicas_lost,
            "replicas_replaced": self.replicas_replaced,
            "replicas_added": self.replicas_added,
            "replicas_left": self.replicas_left,
            "samples": self.samples(),
            "sync": {
                **{name: quantiles._asdict() for name, quantiles in self.sync_quantiles().items()},
                "lost_per_step_s": {
                    "trainer": self.trainer_lost_per_step_s,
                    "rollout": self.rollout_lost_per_step_s,
                    "synchronous_update": self.synchronous_update_s,
                },
            },
        }
