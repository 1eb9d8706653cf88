"""`RunSummary`: the figures that a run ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .version_keeper import SyncTimes


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median, 95th percentile and maximum of a series of seconds; zeros for an empty one."""

    p50: float
    p95: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Nearest-rank quantiles."""
        if not values:
            return cls(0.0, 0.0, 0.0)
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(ordered[round(0.5 * last)], ordered[round(0.95 * last)], ordered[last])

    def to_plain(self) -> dict[str, float]:
        """These figures as JSON-representable data."""
        return {"p50": self.p50, "p95": self.p95, "max": self.max}


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The figures of ``summary.json``, in seconds unless the name says otherwise."""

    accuracy_before: float | None
    """Mean greedy reward on held-out tasks before the first step; None when not measured."""
    accuracy_after: float | None
    versions_committed: int
    """Versions that a quorum of replicas committed, the untrained first one included."""
    versions_aborted: int
    overlap_share: float
    """Share of the training's wall time in which a trainer and a rollout were busy at once."""
    max_token_gap_s: float
    """Longest wait for a next token that spans a commit."""
    generated_tokens: int
    """Tokens that the replicas which live at the end have generated."""
    recomputed_tokens: int
    """Tokens that their requests in flight prefilled again because commits dropped their caches; 0 if caches are kept."""
    wall_s: float
    trainer_blocked_s: Quantiles
    """Publish plus fence, by version."""
    export_s: Quantiles
    """The slowest trainer rank's copy of its shards into the snapshot, by version."""
    transfer_s: Quantiles
    """From the first byte until the slowest replica had verified the last one."""
    install_s: Quantiles
    """The longest commit of a replica."""
    rollout_blocked_s: Quantiles
    """The part of it in which that replica generated nothing."""
    latency_s: Quantiles
    """From the start of a sync until the last replica served the version."""
    trainer_lost_per_step_s: float
    """Time per optimizer step that versions kept the trainer from training: publish plus fence."""
    rollout_lost_per_step_s: float
    """Time per optimizer step that versions kept replicas from decoding; the replica that lost most counts for each version."""
    synchronous_update_s: float
    """Time that a synchronous update costs both sides per step: the median over the versions for which the trainer did wait; 0 if
    there was none."""
    replicas_lost: int = 0
    """Rollout replicas that died."""
    replicas_replaced: int = 0
    """Number of those replicas whose successor serves."""
    drawn_tokens: float = 0.0
    """Mean length, in tokens, of all completions whose turn for training has come, and of those that are left out."""
    trained_tokens: float = 0.0
    """Mean length of the completions that were trained on; below `drawn_tokens` is a bias towards short ones."""
    dropped_groups: int = 0
    """Groups that were too stale, with ``late_groups = "drop"``."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Samples and steps that failed, by kind; see `RunHooks.item_failed`."""

    def to_plain(self) -> dict[str, Any]:
        """These figures as JSON-representable data."""
        return {
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
            "versions_committed": self.versions_committed,
            "overlap_share": self.overlap_share,
            "max_token_gap_s": self.max_token_gap_s,
            "generated_tokens": self.generated_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "wall_s": self.wall_s,
            "replicas_lost": self.replicas_lost,
            "replicas_replaced": self.replicas_replaced,
            "samples": {
                "drawn_tokens": self.drawn_tokens,
                "trained_tokens": self.trained_tokens,
                "dropped_groups": self.dropped_groups,
                "failed": dict(self.failures),
            },
            "sync": {
                "trainer_blocked_s": self.trainer_blocked_s.to_plain(),
                "export_s": self.export_s.to_plain(),
                "transfer_s": self.transfer_s.to_plain(),
                "install_s": self.install_s.to_plain(),
                "rollout_blocked_s": self.rollout_blocked_s.to_plain(),
                "latency_s": self.latency_s.to_plain(),
                "lost_per_step_s": {
                    "trainer": self.trainer_lost_per_step_s,
                    "rollout": self.rollout_lost_per_step_s,
                    "synchronous_update": self.synchronous_update_s,
                },
            },
        }


@dataclass(slots=True)
class RunFigures:
    """Collects the figures of a `RunSummary` during a run."""

    times: SyncTimes
    steps: int = 0
    """Optimizer steps without those that a synchronous update followed."""
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    overlap_share: float = 0.0
    max_token_gap_s: float = 0.0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    wall_s: float = 0.0
    synchronous_update_s: list[float] = field(default_factory=list)
    replicas_lost: int = 0
    replicas_replaced: int = 0
    drawn_tokens: float = 0.0
    trained_tokens: float = 0.0
    dropped_groups: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def synchronous_update_median_s(self) -> float:
        """Median over the versions for which the trainer has waited so far; 0 if there was none."""
        return Quantiles.of(self.synchronous_update_s).p50

    def summary(self) -> RunSummary:
        """The closing figures."""
        steps = max(1, self.steps)
        return RunSummary(
            accuracy_before=self.accuracy_before,
            accuracy_after=self.accuracy_after,
            versions_committed=len(self.times.committed),
            versions_aborted=len(self.times.aborted),
            overlap_share=self.overlap_share,
            max_token_gap_s=self.max_token_gap_s,
            generated_tokens=self.generated_tokens,
            recomputed_tokens=self.recomputed_tokens,
            wall_s=self.wall_s,
            trainer_blocked_s=Quantiles.of(self.times.trainer_blocked_s()),
            export_s=Quantiles.of(self.times.export_s),
            transfer_s=Quantiles.of(self.times.transfer_s),
            install_s=Quantiles.of(self.times.install_s),
            rollout_blocked_s=Quantiles.of(self.times.rollout_blocked_s),
            latency_s=Quantiles.of(self.times.latency_s),
            trainer_lost_per_step_s=sum(self.times.trainer_blocked_s()) / steps,
            rollout_lost_per_step_s=sum(self.times.rollout_blocked_s) / steps,
            synchronous_update_s=self.synchronous_update_median_s,
            replicas_lost=self.replicas_lost,
            replicas_replaced=self.replicas_replaced,
            drawn_tokens=self.drawn_tokens,
            trained_tokens=self.trained_tokens,
            dropped_groups=self.dropped_groups,
            failures=self.failures,
        )
