"""An observer that traces trainer, sync and generation on one time line, for ui.perfetto.dev or chrome://tracing.

Every process appends its events to a part file of its own in a directory next to the trace, and `weightlane.plugins.trace.merge`
merges the parts. The format is Google's "Trace Event Format" as JSON.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from ..hooks import Facts, hookimpl
from .part import DRIVER, Part, Track, as_us, now_us

TRACE_ENV = "WEIGHTLANE_TRACE"
"""Environment variable with the path of the trace."""
TRACE_LIMIT_ENV = "WEIGHTLANE_TRACE_LIMIT_MIB"
"""Environment variable with the most MiB that a process writes."""
DEFAULT_LIMIT_MIB = 32
"""Most MiB that a process writes by default, so that a long run does not fill the disk."""


class TraceObserver:
    """Writes this process's part of a trace.

    Times are those of the host's wall clock, which its processes share. Times of different hosts agree only as well as the clocks
    do. An event is written unbuffered when it ends, so the part of a killed process has all events that ended before.

    Args:
        trace: Path of the merged trace. Nothing is created before the first event.
        limit_mib: Most MiB that this process writes. At the limit, a mark says that later events are missing.
    """

    def __init__(self, trace: Path, limit_mib: float = DEFAULT_LIMIT_MIB) -> None:
        self._part = Part(trace, int(limit_mib * 2**20))
        self._opened: dict[int, int] = {}

    # -- driver ---------------------------------------------------------------------------------------------------------

    @hookimpl
    def run_started(self, facts: Facts) -> None:
        """Write a mark."""
        self._driver("training").mark("run started", facts)

    @hookimpl
    def training_step(self, step: int, facts: Facts) -> None:
        """Write the step, the wait for groups before it, and the curves."""
        end = now_us()
        start = end - as_us(facts, "seconds")
        track = self._driver("training")
        if waited := as_us(facts, "waited_for_rollouts_s"):
            track.span("wait for rollouts", start - waited, start, {})
        track.span(f"step {step}", start, end, facts)
        for curve, keys in _CURVES.items():
            if values := {label: facts[key] for label, key in keys.items() if math.isfinite(facts.get(key, math.nan))}:
                track.curve(curve, end, values)

    @hookimpl
    def evaluated(self, step: int, facts: Facts) -> None:
        """Write the evaluation."""
        self._driver("training").took(f"evaluation at step {step}", facts)

    @hookimpl
    def version_opened(self, version: int) -> None:
        """Keep the start of the version's span."""
        self._opened = {version: now_us()}

    @hookimpl
    def version_committed(self, version: int, facts: Facts) -> None:
        """Write the span from the start of the sync until the version serves."""
        self._version(f"version {version}", version, facts)

    @hookimpl
    def version_aborted(self, version: int, facts: Facts) -> None:
        """Write the span from the start of the sync until the abort, with the error."""
        self._version(f"version {version} aborted", version, facts)

    @hookimpl
    def replica_quarantined(self, replica: str, facts: Facts) -> None:
        """Write a mark."""
        self._driver("versions").mark(f"{replica} quarantined", facts)

    @hookimpl
    def run_ended(self, facts: Facts) -> None:
        """Write a mark."""
        self._driver("training").mark("run ended", facts)

    # -- trainer ranks --------------------------------------------------------------------------------------------------

    @hookimpl
    def rank_stepped(self, step: int, facts: Facts) -> None:
        """Write the step, and inside it forward and backward, fence and optimizer."""
        end = now_us()
        start = end - as_us(facts, "seconds")
        fence = min(end, start + as_us(facts, "forward_backward_s"))
        optimizer = min(end, fence + as_us(facts, "fence_s"))
        track = self._track("trainer", facts, "training")
        start = track.span(f"{facts['role']}: step {step}", start, end, {})
        track.inside("forward, backward", start, fence)
        track.inside("fence", max(start, fence), optimizer)
        track.inside("optimizer", max(start, optimizer), end)

    @hookimpl
    def outputs_computed(self, facts: Facts) -> None:
        """Write the time of the forward pass."""
        self._track("trainer", facts, "training").took(f"{facts['role']}: forward", facts)

    @hookimpl
    def snapshot_taken(self, version: int, facts: Facts) -> None:
        """Write the time of the snapshot's copy, for which the fence waits."""
        self._track("trainer", facts, "snapshot").took(f"snapshot v{version}", facts, version=version)

    @hookimpl
    def bucket_sent(self, version: int, index: int, facts: Facts) -> None:
        """Write the time that the engine took to send a bucket."""
        role = "rollout" if facts.get("relayed") else "trainer"
        self._track(role, facts, "send").took(f"bucket {index}", facts, version=version, index=index)

    # -- rollout ranks and replicas -------------------------------------------------------------------------------------

    @hookimpl
    def bucket_received(self, version: int, index: int, facts: Facts) -> None:
        """Write the time of receiving a bucket, including the wait for it."""
        self._track("rollout", facts, "receive").took(f"bucket {index}", facts, version=version, index=index)

    @hookimpl
    def version_staged(self, version: int, facts: Facts) -> None:
        """Write the time of staging a version."""
        self._track("rollout", facts, "stage").took(f"stage v{version}", facts, version=version)

    @hookimpl
    def replica_committed(self, replica: str, version: int, facts: Facts) -> None:
        """Write the time in which the commit blocked decoding."""
        start = now_us() - as_us(facts, "seconds") + as_us(facts, "waited_s")
        end = start + as_us(facts, "blocked_s")
        track = self._part.track("rollout", replica, "commit")
        track.span(f"commit v{version}", start, end, facts, version=version)

    @hookimpl
    def generation_finished(self, facts: Facts) -> None:
        """Write a request. Concurrent requests are displayed below each other."""
        end = now_us()
        track = self._part.track("rollout", str(facts["replica"]), "generation", parallel=True)
        track.span(f"{facts['tokens']} tokens", end - as_us(facts, "seconds"), end, facts)

    def _driver(self, name: str) -> Track:
        return self._part.track(DRIVER, DRIVER, name)

    def _track(self, role: str, facts: Facts, name: str) -> Track:
        return self._part.track(role, str(facts.get("participant", role)), name)

    def _version(self, name: str, version: int, facts: Facts) -> None:
        end = now_us()
        start = self._opened.pop(version, end - as_us(facts, "seconds"))
        self._driver("versions").span(name, start, end, facts, version=version)


_CURVES = {
    "reward": {"mean": "reward"},
    "staleness (versions)": {"mean": "staleness_mean", "max": "staleness_max"},
    "tokens per second": {"generated": "tokens_per_s"},
}


def trace_from_environment(path: str) -> TraceObserver:
    """Make the observer for a value of `TRACE_ENV`."""
    return TraceObserver(Path(path), float(os.environ.get(TRACE_LIMIT_ENV) or DEFAULT_LIMIT_MIB))
