"""A row of the benchmark: weightlane with one engine, one codec and one level of integrity."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from weightlane.ckpt_engines import WeightlaneError, WorkerDiedError
from weightlane.sync.config import SyncConfig
from weightlane.sync.control.coordinator.coordinator import Coordinator
from weightlane.sync.control.coordinator.replicas import CommitReport, SyncReport

from ..processes.participants import start_coordinator
from ..processes.processes import Processes, Worker
from ..processes.worker import Span, subscriber_name
from ..report.bench_report import PHASES
from .contenders import Figures, Round

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
    _versions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _receivers: list[_Receiver] = field(default_factory=list)
    _coordinator: Coordinator | None = None
    _snapshot_s: float = 0.0

    @contextmanager
    def opened(self) -> Iterator[Round]:
        """See `contenders`."""
        name = self.facts.name
        self._receivers = [
            _Receiver(name, worker, subscriber_name(number), f"rollout-{number}", self.timeout_s)
            for number, worker in enumerate(self.processes.receivers)
        ]
        self._coordinator, address = start_coordinator(self.facts.config, self._receivers)
        self.processes.on_death(self._died)
        config = self.facts.config.model_dump(mode="json")
        opened = (name, address, self.facts.engine, dict(self.facts.options), config)
        self.processes.every("open_row", *opened, timeout_s=self.timeout_s)
        # If a row is opened again, one version is enough, because the first version of each round warms up, too.
        for _ in range(1 if self.peak_trainer_bytes else _WARM_UP_VERSIONS):
            self.processes.sender.call("change", self.density, timeout_s=self.timeout_s)
            self._synced(step_s=0.0)
        trainer, *rollouts = self.processes.every("peak_bytes", name, timeout_s=self.timeout_s)
        self.peak_trainer_bytes = max(self.peak_trainer_bytes, trainer)
        self.peak_rollout_bytes = max(self.peak_rollout_bytes, *rollouts)
        self._receivers_of_deltas("keep")
        yield self._round
        self.processes.on_death(None)
        self._coordinator.close()
        self._coordinator = None
        self.processes.every("close_row", name, timeout_s=self.timeout_s)

    def _round(self) -> Figures:
        self.processes.on_death(self._died)
        self._receivers_of_deltas("restore")
        bare = self._changed_version(step_s=0.0)
        step_s = _STEP_PER_SNAPSHOT * self._snapshot_s if self.step_s is None else self.step_s
        figures = self._changed_version(step_s)
        self._receivers_of_deltas("keep")
        return figures | {"trainer_blocked_without_step_s": bare["trainer_blocked_s"]}

    def slowdown(self, seconds: float) -> Figures:
        """Measure the loops' steps per second during back-to-back versions, as a share of those without any version.

        Both are measured in turns for `seconds` each, so that a change of the machine affects both. Medians are compared.
        """
        self.processes.on_death(self._died)
        self._receivers_of_deltas("restore")
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

    def _receivers_of_deltas(self, method: str) -> None:
        """Let receivers `keep` or `restore` the row's last version: a delta applies to that alone, and all rows share memory."""
        if self.facts.config.codec != "dense":
            self.processes.every_receiver(method, self.facts.name, timeout_s=self.timeout_s)

    def _rates(self, meanwhile: Callable[[], object]) -> list[float]:
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
            self._synced(step_s=0.0)
            if time.monotonic() >= end:
                return

    def _changed_version(self, step_s: float) -> Figures:
        """Change the parameters, sync them, and compare all receivers' parameters with the sender's."""
        self.processes.sender.call("change", self.density, timeout_s=self.timeout_s)
        figures = self._synced(step_s)
        expected, *found = self.processes.every("crc", self.facts.config.quantise, timeout_s=self.timeout_s)
        self.verified = self.verified and found == [expected] * len(found)
        return figures

    def _synced(self, step_s: float) -> Figures:
        """Sync the current parameters, with a step of `step_s` seconds between publication and fence."""
        version = next(self._versions)
        published, report = self.runner.run(self._sync(version, step_s))
        sender, *receivers = self.processes.every("moments", self.facts.name, version, timeout_s=self.timeout_s)
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
            "wire_bytes": report.sent_bytes,
            **{name: after - before for name, before, after in zip(PHASES, ends, ends[1:], strict=False)},
        }

    async def _sync(self, version: int, step_s: float) -> tuple[dict[str, float], SyncReport]:
        assert self._coordinator is not None
        timeout_s = self.timeout_s + step_s + _GRACE_S
        publishing = asyncio.create_task(
            asyncio.to_thread(
                self.processes.sender.call, "publish", self.facts.name, version, step_s, timeout_s=timeout_s
            )
        )
        syncing = asyncio.create_task(self._coordinator.sync(version))
        try:
            await asyncio.wait({publishing, syncing}, return_when=asyncio.FIRST_EXCEPTION)
        except BaseException:
            # Otherwise threads that wait for the processes would keep an interrupted command from ending.
            self.processes.close()
            self._coordinator.close()
            raise
        if publishing.done() and (error := publishing.exception()) is not None:
            self._coordinator.close()  # otherwise it would wait for the publisher
            await asyncio.gather(syncing, return_exceptions=True)
            raise error
        await asyncio.gather(publishing, return_exceptions=True)
        return (await publishing), (await syncing)

    def _died(self, worker: Worker, error: WorkerDiedError) -> None:
        if (coordinator := self._coordinator) is not None:
            replica = next((receiver.name for receiver in self._receivers if receiver.worker is worker), "")
            coordinator.participant_lost(error, replica)
