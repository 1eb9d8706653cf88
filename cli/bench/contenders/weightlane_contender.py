"""A row of the benchmark: weightlane with one engine, one codec and one level of integrity."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightlane.ckpt_engines import WeightlaneError, WorkerDiedError
from weightlane.sync.config import SyncConfig
from weightlane.sync.control.coordinator.report import CommitReport, SyncReport

from ..processes.participants import CoordinatingSide
from ..processes.processes import Processes, Worker
from ..processes.worker import Span, subscriber_name
from ..report.bench_report import PHASES
from .contenders import Figures

_WARM_UP_VERSIONS = 2
"""A subscriber may stage two versions; both allocations are part of the peak memory."""
_STEP_PER_SNAPSHOT = 1.5
"""Length of a default step over that of a snapshot: the fence then finds the snapshot complete."""
_GRACE_S = 10.0
"""Seconds that a publish call may take beyond deadline and step before its process counts as hanging."""
_SLOWDOWN_TURNS = 3


@dataclass(frozen=True, slots=True)
class RowFacts:
    """The settings of a row."""

    engine: str
    codec: str
    integrity: str
    options: Mapping[str, Any]
    config: SyncConfig

    @property
    def name(self) -> str:
        """The row's name in tables, and the key of its figures."""
        return f"{self.engine} {self.codec} {self.integrity}"


@dataclass(slots=True)
class _Receiver:
    """The coordinator's view of a receiver: a replica of one rank."""

    row: str
    worker: Worker
    subscriber: str
    name: str
    timeout_s: float
    committed: Span = (0.0, 0.0)

    def subscriber_names(self) -> list[str]:
        return [self.subscriber]

    async def commit(self, version: int) -> CommitReport:
        self.committed = await asyncio.to_thread(
            self.worker.call, "commit", self.row, version, timeout_s=self.timeout_s
        )
        return CommitReport(version, self.committed[1] - self.committed[0])

    async def rollback(self, version: int) -> None:
        """Do nothing: any failure ends the benchmark."""

    async def quarantine(self, error: WeightlaneError) -> None:
        """Do nothing: any failure ends the benchmark."""


@dataclass(slots=True)
class RowContender:
    """Measures one row.

    Every round sends two versions. The first has no step between publication and fence; it carries everything that changed since
    the row's last round. The second carries a change of exactly `density`, and its figures are the row's.
    """

    facts: RowFacts
    processes: Processes
    runner: asyncio.Runner
    density: float
    step_s: float | None
    timeout_s: float
    verified: bool = True
    peak_trainer_bytes: int = 0
    peak_rollout_bytes: int = 0
    last: SyncReport | None = None
    """The report of the newest version."""
    _versions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _receivers: list[_Receiver] = field(default_factory=list)
    _meeting: CoordinatingSide | None = None
    _snapshot_s: float = 0.0

    @property
    def name(self) -> str:
        """See `RowFacts.name`."""
        return self.facts.name

    def open(self) -> None:
        """See `Contender.open`."""
        self._receivers = [
            _Receiver(self.name, worker, subscriber_name(number), f"rollout-{number}", self.timeout_s)
            for number, worker in enumerate(self.processes.receivers)
        ]
        self._meeting = CoordinatingSide(self.facts.config, self._receivers)
        self.processes.on_death(self._died)
        config = self.facts.config.model_dump(mode="json")
        opened = (self.name, self._meeting.address, self.facts.engine, dict(self.facts.options), config)
        self.processes.every("open_row", *opened, timeout_s=self.timeout_s)
        # If a row is opened again, one version is enough, because the first version of each round warms up, too.
        for _ in range(1 if self.peak_trainer_bytes else _WARM_UP_VERSIONS):
            self.processes.sender.call("change", self.density, timeout_s=self.timeout_s)
            self.sync(step_s=0.0)
        trainer, *rollouts = self.processes.every("peak_bytes", self.name, timeout_s=self.timeout_s)
        self.peak_trainer_bytes = max(self.peak_trainer_bytes, trainer)
        self.peak_rollout_bytes = max(self.peak_rollout_bytes, *rollouts)

    def round(self) -> Figures:
        """See `Contender.round`."""
        self.processes.on_death(self._died)
        bare = self._changed_version(step_s=0.0)
        step_s = _STEP_PER_SNAPSHOT * self._snapshot_s if self.step_s is None else self.step_s
        figures = self._changed_version(step_s)
        return figures | {"trainer_blocked_without_step_s": bare["trainer_blocked_s"]}

    def close(self) -> None:
        """See `Contender.close`."""
        self.processes.on_death(None)
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()
            self.processes.every("close_row", self.name, timeout_s=self.timeout_s)

    def slowdown(self, seconds: float) -> Figures:
        """Measure the loops' steps per second during back-to-back versions, as a share of those without any version.

        Both are measured in turns for `seconds` each, so that a change of the machine affects both. Medians are compared.
        """
        self.processes.on_death(self._died)
        self.processes.every("start_loop", timeout_s=self.timeout_s)
        alone: list[list[float]] = []
        beside: list[list[float]] = []
        try:
            self._rates(lambda: self._versions_for(0.0))  # one version, to warm up
            for _ in range(_SLOWDOWN_TURNS):
                alone.append(self._rates(lambda: time.sleep(seconds / _SLOWDOWN_TURNS)))
                beside.append(self._rates(lambda: self._versions_for(seconds / _SLOWDOWN_TURNS)))
        finally:
            self.processes.every("stop_loop", timeout_s=self.timeout_s)
        trainer, *decode = [
            statistics.median(after) / statistics.median(before)
            for before, after in zip(zip(*alone, strict=True), zip(*beside, strict=True), strict=True)
        ]
        return {"trainer": trainer, "decode": sum(decode) / len(decode)}

    def _rates(self, meanwhile: Any) -> list[float]:
        before = self.processes.every("loop_steps", timeout_s=self.timeout_s)
        meanwhile()
        after = self.processes.every("loop_steps", timeout_s=self.timeout_s)
        return [
            max(1, steps - earlier) / (now - then) for (earlier, then), (steps, now) in zip(before, after, strict=True)
        ]

    def _versions_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:  # at least one version
            if self.facts.codec != "dense":  # a dense version costs the same whatever changed
                self.processes.sender.call("change", self.density, timeout_s=self.timeout_s)
            self.sync(step_s=0.0)
            if time.monotonic() >= end:
                return

    def _changed_version(self, step_s: float) -> Figures:
        """Change the parameters, sync them, and compare them."""
        self.processes.sender.call("change", self.density, timeout_s=self.timeout_s)
        figures = self.sync(step_s)
        self.verify()
        return figures

    def verify(self) -> None:
        """Compare all receivers' parameters with the sender's."""
        quantise = self.facts.config.quantise
        expected, *found = self.processes.every("crc", quantise, timeout_s=self.timeout_s)
        self.verified = self.verified and found == [expected] * len(found)

    def sync(self, step_s: float) -> Figures:
        """Sync the current parameters, with a step of `step_s` seconds between publication and fence."""
        version = next(self._versions)
        published, self.last = self.runner.run(self._sync(version, step_s))
        sender, *receivers = self.processes.every("moments", self.name, version, timeout_s=self.timeout_s)
        self._snapshot_s = sender.get("snapshot_s", 0.0)
        commits = [receiver.committed for receiver in self._receivers]
        started, ended = published["started"], max(end for _, end in commits)
        moments = [  # an engine may have had nothing to send
            sender.get("snapshot_ended", started),
            sender.get("send_started", started),
            sender.get("send_ended", started),
            max(receiver.get("staged", started) for receiver in receivers),
            min(start for start, _ in commits),
            ended,
        ]
        # A phase that overlaps an earlier one counts only as far as it ends later.
        ends = list(itertools.accumulate([started, *moments], max))
        return {
            "trainer_blocked_s": published["publish_s"] + published["fence_s"],
            "rollout_blocked_s": max(end - start for start, end in commits),
            "latency_s": ended - started,
            "wire_bytes": self.last.sent_bytes,
            **{name: after - before for name, before, after in zip(PHASES, ends, ends[1:], strict=False)},
        }

    async def _sync(self, version: int, step_s: float) -> tuple[dict[str, float], SyncReport]:
        assert self._meeting is not None
        timeout_s = self.timeout_s + step_s + _GRACE_S
        publishing = asyncio.create_task(
            asyncio.to_thread(self.processes.sender.call, "publish", self.name, version, step_s, timeout_s=timeout_s)
        )
        syncing = asyncio.create_task(self._meeting.sync(version))
        try:
            await asyncio.wait({publishing, syncing}, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            # Otherwise threads that wait for the processes would keep an interrupted command from ending.
            self.processes.close()
            self._meeting.close()
            raise
        if publishing.done() and (error := publishing.exception()) is not None:
            self._meeting.close()  # otherwise the coordinator would wait for the publisher
            await asyncio.gather(syncing, return_exceptions=True)
            raise error
        await asyncio.gather(publishing, return_exceptions=True)
        return (await publishing), (await syncing)

    def _died(self, worker: Worker, error: WorkerDiedError) -> None:
        if (meeting := self._meeting) is not None:
            replica = next((receiver.name for receiver in self._receivers if receiver.worker is worker), "")
            meeting.coordinator.participant_lost(error, replica)
