"""Runs a benchmark. Each round measures every contender once, so that a disturbance of the machine affects all of them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import (
    CheckpointEngineRegistry,
    ConfigError,
    EngineImportError,
    EngineUnavailableError,
    StagingMemoryError,
    WeightlaneError,
)
from weightlane.ckpt_engines.runtime.devices import device_count, is_available

from .contenders.contenders import RAW, Contender, Copies, Figures, Files, Gloo, plain_options
from .contenders.weightlane_contender import RowContender, RowFacts
from .processes.participants import LOSSY, check_offered, sync_config
from .processes.processes import Processes
from .processes.raw_transports import has_safetensors
from .report.bench_report import PHASES, BenchReport, Blocking, ExtraBytes, Limits, Phases, Row, Setup, Slowdown, Spread
from .report.machine import available_bytes, this_machine
from .settings import BenchSettings
from .workload.workload import Workload, named_workload

_PART = "benchmark"
_NOISY = 1.25
"""Longest over shortest time of one copy above which the report says that the machine was busy."""
_SHARE_OF_MEMORY = 0.7
"""Share of the free memory that all open rows may take together. Transports need the rest."""
_STAGED_VERSIONS = 2
"""Versions that a subscriber may stage at a time."""


def run_bench(settings: BenchSettings, say: Callable[[str], None] = lambda _: None) -> BenchReport | dict[str, str]:
    """Run the benchmark that `settings` describe.

    Args:
        settings: Engines, model and rounds.
        say: Called with each line about the progress.

    Returns:
        The report; if none of the engines can run here, only the reasons by engine.

    Raises:
        ConfigError: A setting is wrong, or model, directory or device do not exist.
        RegistryError: An engine does not exist or is broken.
        StagingMemoryError: The model is too large for this machine's memory.
        WorkerDiedError: One of the processes died. The others were ended.
        WeightlaneError: A sync failed.
    """
    check_offered("codec", settings.codecs)
    lossy = sorted(set(settings.codecs).intersection(LOSSY))
    if lossy and (deltas := sorted(set(settings.codecs).difference(LOSSY, ["dense"]))):
        raise ConfigError(
            f"after {' and '.join(lossy)} the receivers hold rounded weights, to which {' and '.join(deltas)} cannot be applied.",
            part=_PART,
            hint="Measure them in two runs.",
        )
    check_offered("integrity", settings.integrity)
    if not is_available(settings.device):
        raise ConfigError("there is no CUDA device.", part=_PART, hint="Use --device cpu.")
    if settings.devices > (there := device_count(settings.device)):
        raise ConfigError(
            f"--devices is {settings.devices}, but there is only {there} with --device {settings.device}.",
            part=_PART,
            hint="Lower --devices.",
        )
    workload = named_workload(settings.model)
    if settings.directory is not None and not settings.directory.is_dir():
        raise ConfigError(f"there is no directory {settings.directory}.", part=_PART)
    with tempfile.TemporaryDirectory(prefix="weightlane-bench-", dir=settings.directory) as directory:
        rows, unavailable = _rows(settings, Path(directory))
        if not rows:
            return unavailable
        keep_open = _keep_open(settings, workload, len(rows))
        say(
            f"{workload.name}: {len(workload.specs)} tensors, {workload.nbytes / 1e6:.1f} MB, {settings.receivers} receivers"
        )
        with (
            Processes(settings.receivers, workload.flat_bytes, Path(directory)) as processes,
            asyncio.Runner() as runner,
        ):
            bench = _Bench(settings, workload, processes, runner, rows, Path(directory), keep_open=keep_open, say=say)
            try:
                return bench.report(unavailable)
            except WeightlaneError as error:
                processes.raise_if_dead(error)
                raise


def _rows(settings: BenchSettings, directory: Path) -> tuple[list[RowFacts], dict[str, str]]:
    registry = CheckpointEngineRegistry()
    rows: list[RowFacts] = []
    unavailable: dict[str, str] = {}
    for engine in settings.engines:
        given = dict(settings.options.get(engine, {}))
        try:
            cls = registry.engine_class(engine)
            needs_path = (field := cls.config_type.model_fields.get("path")) is not None and field.is_required()
            own = directory / engine.replace(":", "-").replace("/", "-")
            registry.create(engine, given | ({"path": str(own)} if needs_path and "path" not in given else {}))
        except (EngineUnavailableError, EngineImportError) as error:
            unavailable[engine] = error.message
            continue
        if cls.capabilities.devices.isdisjoint({"cpu", settings.device}):
            unavailable[engine] = (
                f"it cannot send {settings.device.upper()} memory, where the benchmark keeps its parameters"
            )
            continue
        for codec in settings.codecs:
            for integrity in settings.integrity:
                # One directory for each row, because only one run at a time may write to a store.
                more = {"path": str(own / f"{codec}-{integrity}")} if needs_path and "path" not in given else {}
                config = sync_config(
                    codec=codec,
                    integrity=integrity,
                    bucket_mib=settings.bucket_mib,
                    deadline_s=settings.deadline_s,
                )
                rows.append(RowFacts(engine, codec, integrity, plain_options(given | more), config))
    return rows, unavailable


def _keep_open(settings: BenchSettings, workload: Workload, rows: int) -> bool:
    """Return whether memory suffices to keep all rows connected. Raises `StagingMemoryError` if it does not even for one."""
    receivers = settings.receivers
    parameters = (1 + receivers) + (1 + receivers)  # the live ones, and the targets of the plain copies
    row = 1 + _STAGED_VERSIONS * receivers
    free = available_bytes(settings.device)
    if free is None:
        return False
    needed = (parameters + row) * workload.nbytes
    if needed > free:
        raise StagingMemoryError(
            f"{workload.name} with {receivers} receivers needs {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free.",
            part=_PART,
            hint="Measure a smaller model, or lower --receivers.",
        )
    return (parameters + rows * row) * workload.nbytes < _SHARE_OF_MEMORY * free


class _Bench:
    """One run of the benchmark."""

    def __init__(
        self,
        settings: BenchSettings,
        workload: Workload,
        processes: Processes,
        runner: asyncio.Runner,
        rows: list[RowFacts],
        directory: Path,
        *,
        keep_open: bool,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._workload = workload
        self._processes = processes
        self._keep_open = keep_open
        self._say = say
        self._bucket_bytes = rows[0].config.bucket_bytes
        timeout_s = settings.deadline_s
        self._rows = [
            RowContender(facts, processes, runner, settings.density, settings.step_s, timeout_s) for facts in rows
        ]
        limits: list[Contender] = [Copies(processes, timeout_s), Gloo(processes, timeout_s, self._bucket_bytes)]
        if any(facts.engine == "filesystem" for facts in rows) and has_safetensors():
            limits.append(Files(processes, timeout_s, directory))
        self._contenders: list[Contender] = [*limits, *self._rows]
        self._open: set[str] = set()
        self._rounds: dict[str, list[Figures]] = {contender.name: [] for contender in self._contenders}

    def report(self, unavailable: dict[str, str]) -> BenchReport:
        """Measure all contenders and return the report."""
        settings = self._settings
        plain = self._workload.to_plain()
        finite = not set(LOSSY).isdisjoint(settings.codecs)
        prepared = plain, settings.seed, settings.threads, finite, settings.device, settings.devices
        self._processes.every("prepare", *prepared, timeout_s=settings.deadline_s)
        for number in range(settings.rounds + 1):
            self._say(f"round {number} of {settings.rounds}" if number else "warming up")
            for contender in self._contenders:
                figures = self._measure(contender, contender.round)
                if number:  # the first round is slower: it touches new memory, and TCP still adapts
                    self._rounds[contender.name].append(figures)
        slowdowns = {row.name: self._slowdown(row) for row in self._rows} if settings.loops else {}
        for contender in self._contenders:
            if contender.name in self._open:
                contender.close()
        limits = Limits.model_validate(self._spreads(Copies.name, Limits.model_fields))
        notes = self._notes(limits)
        return BenchReport(
            machine=this_machine(settings.device),
            setup=Setup(
                date=datetime.now(UTC).date().isoformat(),
                model=self._workload.name,
                device=settings.device,
                tensors=len(self._workload.specs),
                payload_bytes=self._workload.nbytes,
                receivers=settings.receivers,
                rounds=settings.rounds,
                seed=settings.seed,
                threads=settings.threads,
                bucket_bytes=self._bucket_bytes,
            ),
            limits=limits,
            blocking=Blocking.model_validate(self._spreads(Gloo.name, Blocking.model_fields)),
            rows=[self._row(row, slowdowns.get(row.name)) for row in self._rows],
            unavailable=unavailable,
            notes=notes,
        )

    def _measure(self, contender: Contender, measurement: Callable[[], Figures]) -> Figures:
        """Open `contender` if it is closed, run `measurement`, and close it again if memory is scarce."""
        if contender.name not in self._open:
            contender.open()
            self._open.add(contender.name)
        figures = measurement()
        if not self._keep_open and contender in self._rows:
            contender.close()
            self._open.discard(contender.name)
        return figures

    def _slowdown(self, row: RowContender) -> Slowdown:
        self._say(f"measuring how {row.name} slows down training and decoding")
        return Slowdown.model_validate(self._measure(row, lambda: row.slowdown(self._settings.loop_s)))

    def _row(self, row: RowContender, slowdown: Slowdown | None) -> Row:
        figures = self._rounds[row.name]
        times = ("trainer_blocked_s", "trainer_blocked_without_step_s", "rollout_blocked_s", "latency_s")
        spreads = self._spreads(row.name, (*times, "wire_bytes", *PHASES))
        source, pick = RAW.get(row.facts.engine, ("", lambda _: 0.0))
        raw = [pick(figures) for figures in self._rounds.get(source, [])]
        return Row(
            engine=row.facts.engine,
            codec=row.facts.codec,
            integrity=row.facts.integrity,
            density=self._settings.density,
            payload_bytes=self._workload.nbytes,
            wire_bytes=round(spreads["wire_bytes"].median),
            raw_transport_s=Spread.over(raw) if raw else None,
            phases=Phases.model_validate({name: spreads[name] for name in PHASES}),
            extra_bytes=ExtraBytes(trainer=row.peak_trainer_bytes, rollout=row.peak_rollout_bytes),
            slowdown=slowdown,
            rounds=len(figures),
            verified=row.verified,
            **{name: spreads[name] for name in times},
        )

    def _spreads(self, contender: str, names: Any) -> dict[str, Spread]:
        rounds = self._rounds[contender]
        return {name: Spread.over([figures[name] for figures in rounds]) for name in names}

    def _notes(self, limits: Limits) -> list[str]:
        notes = []
        copy = limits.memcpy_s
        if copy.max > _NOISY * copy.min:
            notes.append(
                f"The machine was busy: the time of one copy varied from {1e3 * copy.min:.2f} to {1e3 * copy.max:.2f} ms."
                " Compare ratios within this run rather than times, and repeat the run."
            )
        busy = 1 + self._settings.receivers
        if this_machine().cores < busy:
            notes.append(f"{busy} processes share {this_machine().cores} cores, which makes every time longer.")
        if not self._keep_open:
            notes.append(
                "Memory is too small for all rows at once: each row was reconnected and warmed up again for every round."
            )
        if any(row.facts.engine == "filesystem" for row in self._rows) and not has_safetensors():
            notes.append("safetensors is not installed, so the filesystem rows have no bare transport to compare with.")
        return notes
