"""Runs a benchmark. Each round measures every contender once, so that a disturbance of the machine affects all of them."""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from weightlane.ckpt_engines import (
    CheckpointEngineRegistry,
    ConfigError,
    EngineImportError,
    EngineUnavailableError,
    StagingMemoryError,
    WeightlaneError,
)
from weightlane.ckpt_engines.runtime.cpus import usable_cpus
from weightlane.ckpt_engines.runtime.devices import device_count, is_available

from .contenders.contenders import BLOCKING, COPIES, FILES, RAW, Contender, Figures, Round, copies, files, gloo
from .contenders.weightlane_contender import RowContender, RowFacts
from .processes.participants import LOSSY, check_offered, sync_config
from .processes.processes import Processes
from .report.bench_report import (
    PHASES,
    BenchReport,
    Blocking,
    ExtraBytes,
    Limits,
    Phases,
    Row,
    Setup,
    Slowdown,
    Spread,
)
from .report.latency_fit import LatencyFit
from .report.machine import available_bytes, this_machine
from .settings import BenchSettings
from .workload.workload import Workload, named_workload

_PART = "benchmark"
_NOISY = 1.25
"""Longest over shortest time of one copy above which the report says that the machine was busy."""
_SHARE_OF_MEMORY = 0.7
"""Share of the free memory that all open rows may take together. Transports need the rest."""
_FITTED_SHARES = (1 / 4, 1 / 16)
"""Parts of a model that are measured for a fit, next to all of it."""
_STAGED_VERSIONS = 2
"""Versions that a subscriber may stage at a time."""


def run_bench(settings: BenchSettings, say: Callable[[str], None] = lambda _: None) -> BenchReport | dict[str, str]:
    """Run the benchmark that `settings` describe. `say` is called with each line about the progress.

    Returns the report; if none of the engines can run here, only the reasons by engine.

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
    report = _measured(settings, workload, say)
    if not isinstance(report, BenchReport) or not settings.fit:
        return report
    plain = settings.model_copy(update={"loops": False})
    reports = [report]
    for share in _FITTED_SHARES:
        of_part = _measured(plain, workload.part(share), say)
        assert isinstance(of_part, BenchReport), "the engines run here"
        reports.insert(0, of_part)
    return report.model_copy(
        update={"rows": [_fitted(rows) for rows in zip(*(each.rows for each in reports), strict=True)]}
    )


def _fitted(rows: Sequence[Row]) -> Row:
    """The last of `rows`, which are of growing parts of the model, with the fit through all of them."""
    fit = LatencyFit.through([row.payload_bytes for row in rows], [row.latency_s.median for row in rows])
    return rows[-1].model_copy(update={"fit": fit, "verified": all(row.verified for row in rows)})


def _measured(settings: BenchSettings, workload: Workload, say: Callable[[str], None]) -> BenchReport | dict[str, str]:
    """Measure one workload, with processes of its own."""
    with tempfile.TemporaryDirectory(prefix="weightlane-bench-", dir=settings.directory) as directory:
        rows, unavailable = _rows(settings, Path(directory))
        if not rows:
            return unavailable
        keep_open = _keep_open(settings, workload, rows)
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
                    codec=codec, integrity=integrity, bucket_mib=settings.bucket_mib, deadline_s=settings.deadline_s
                )
                rows.append(RowFacts(engine, codec, integrity, given | more, config))
    return rows, unavailable


def _keep_open(settings: BenchSettings, workload: Workload, rows: Sequence[RowFacts]) -> bool:
    """Return whether memory suffices to keep all rows connected. Raises `StagingMemoryError` if it does not even for one."""
    receivers = settings.receivers
    parameters = (1 + receivers) + (1 + receivers)  # the live ones, and the targets of the plain copies
    # Receivers of deltas keep a copy of their row's last version.
    copies = [1 + (_STAGED_VERSIONS + (row.config.codec != "dense")) * receivers for row in rows]
    free = available_bytes(settings.device)
    if free is None:
        return False
    needed = (parameters + max(copies, default=0)) * workload.nbytes
    if needed > free:
        raise StagingMemoryError(
            f"{workload.name} with {receivers} receivers needs {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free.",
            part=_PART,
            hint="Measure a smaller model, or lower --receivers.",
        )
    return (parameters + sum(copies)) * workload.nbytes < _SHARE_OF_MEMORY * free


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
        self._rows = {
            facts.name: RowContender(facts, processes, runner, settings.density, settings.step_s, timeout_s)
            for facts in rows
        }
        writes_files = any(facts.engine == "filesystem" for facts in rows)
        self._lacks_safetensors = writes_files and importlib.util.find_spec("safetensors") is None
        self._contenders: dict[str, Contender] = {
            COPIES: partial(copies, processes, timeout_s),
            BLOCKING: partial(gloo, processes, timeout_s, self._bucket_bytes),
        }
        if writes_files and not self._lacks_safetensors:
            self._contenders[FILES] = partial(files, processes, timeout_s, directory / "limit.safetensors")
        self._contenders |= {name: row.opened for name, row in self._rows.items()}
        self._open: dict[str, tuple[ExitStack, Round]] = {}
        self._rounds: dict[str, list[Figures]] = {name: [] for name in self._contenders}

    def report(self, unavailable: dict[str, str]) -> BenchReport:
        """Measure all contenders and return the report."""
        settings = self._settings
        plain = self._workload.to_plain()
        finite = not set(LOSSY).isdisjoint(settings.codecs)
        prepared = plain, settings.seed, settings.threads, finite, settings.device, settings.devices
        self._processes.every("prepare", *prepared, timeout_s=settings.deadline_s)
        for number in range(settings.rounds + 1):
            self._say(f"round {number} of {settings.rounds}" if number else "warming up")
            for name, rounds in self._rounds.items():
                figures = self._measure(name)
                if number:  # the first round is slower: it touches new memory, and TCP still adapts
                    rounds.append(figures)
        slowdowns = {name: self._slowdown(name) for name in self._rows} if settings.loops else {}
        for opened, _ in self._open.values():
            opened.close()
        limits = Limits.model_validate(self._spreads(COPIES, Limits.model_fields))
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
            blocking=Blocking.model_validate(self._spreads(BLOCKING, Blocking.model_fields)),
            rows=[self._row(name, slowdowns.get(name)) for name in self._rows],
            unavailable=unavailable,
            notes=self._notes(limits),
        )

    def _measure(self, name: str, measurement: Round | None = None) -> Figures:
        """Run `measurement`, by default a round. Open the contender before if it is closed; close it if memory is scarce."""
        if name not in self._open:
            stack = ExitStack()
            self._open[name] = stack, stack.enter_context(self._contenders[name]())
        opened, measure = self._open[name]
        figures = (measurement or measure)()
        if not self._keep_open and name in self._rows:
            del self._open[name]
            opened.close()
        return figures

    def _slowdown(self, name: str) -> Slowdown:
        self._say(f"measuring how {name} slows down training and decoding")
        measurement = partial(self._rows[name].slowdown, self._settings.loop_s)
        return Slowdown.model_validate(self._measure(name, measurement))

    def _row(self, name: str, slowdown: Slowdown | None) -> Row:
        row = self._rows[name]
        times = ("trainer_blocked_s", "trainer_blocked_without_step_s", "rollout_blocked_s", "latency_s")
        spreads = self._spreads(name, (*times, "wire_bytes", *PHASES))
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
            phases=Phases.model_validate({phase: spreads[phase] for phase in PHASES}),
            extra_bytes=ExtraBytes(trainer=row.peak_trainer_bytes, rollout=row.peak_rollout_bytes),
            slowdown=slowdown,
            rounds=len(self._rounds[name]),
            verified=row.verified,
            **{time: spreads[time] for time in times},
        )

    def _spreads(self, contender: str, names: Iterable[str]) -> dict[str, Spread]:
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
        if (cores := usable_cpus()) < busy:
            notes.append(f"{busy} processes share {cores} cores, which makes every time longer.")
        if not self._keep_open:
            notes.append(
                "Memory is too small for all rows at once: each row was reconnected and warmed up again for every round."
            )
        if self._lacks_safetensors:
            notes.append("safetensors is not installed, so the filesystem rows have no bare transport to compare with.")
        return notes
