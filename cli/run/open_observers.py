"""Opens and closes the observers that a run's configuration requests, and reports their problems to the user."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from weightlane.ckpt_engines import AddressInUseError, ConfigError
from weightlane.ckpt_engines.runtime.threads import within
from weightlane.plugins import RunHooks, make_hooks
from weightlane.plugins.disabled_plugins import REPORT_FILE_ENV, reported_in
from weightlane.plugins.profiler import PROFILE_ENV
from weightlane.plugins.prometheus import PROMETHEUS_TOKEN_ENV, PrometheusObserver
from weightlane.plugins.tensorboard import TensorBoardObserver
from weightlane.plugins.trace.merge import claim, merge
from weightlane.plugins.trace.observer import TRACE_ENV, TRACE_LIMIT_ENV, TraceObserver
from weightlane.plugins.trace.part import parts_dir
from weightlane.plugins.trackers import TRACKERS, TrackerObserver

from ..config.run_config import ObserversSection

_TRACKER_S = 120.0
"""Longest time that a tracker may take to begin its run, and to upload the rest of it at the end."""

_SECRET = re.compile(
    r"(?i)^storage_options$|(^|[_-])((api|access|secret|auth)[_-]?key|token|password|secret|credentials?|headers)$"
)
"""Names of settings that may hold a secret. Engines, environments and stores take options of any name."""


def metrics_endpoint(port: int, host: str) -> tuple[PrometheusObserver, str]:
    """Serve metrics. Returns the observer and its URL. Raises `AddressInUseError`."""
    observer = PrometheusObserver(port, host, os.environ.get(PROMETHEUS_TOKEN_ENV, ""))
    try:
        return observer, observer.start()
    except (OSError, TypeError) as error:  # the last one is about names that no machine can have
        raise AddressInUseError(
            f"cannot serve metrics on {host}:{port}: {getattr(error, 'strerror', error)}.",
            part="prometheus",
            hint="observers.prometheus_host is an address of this machine; observers.prometheus_port 0 takes a free port.",
        ) from error


class RunObservers:
    """A context manager with the hooks of a run. Its end closes the observers and merges the trace.

    `section` has the requested observers, and `own` those that every run has. `run_dir` is the absolute path of the run's
    directory. `settings` is the run's configuration, which trackers show. `say` prints a line.
    """

    def __init__(
        self,
        section: ObserversSection,
        run_dir: Path,
        own: Sequence[object],
        say: Callable[[str], None],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._section = section
        self._run_dir = run_dir
        self._settings = None if settings is None else _without_keys(settings)
        self._own = own
        self._say = say
        self._trace = claim(run_dir / section.trace) if section.trace is not None else None
        self._tensorboard = run_dir / section.tensorboard if section.tensorboard is not None else None
        self._reports = run_dir / "logs" / "plugins.log"
        self._stack = ExitStack()
        profile = section.profile.model_copy(update={"dir": run_dir / section.profile.dir})
        self.environment = {
            # Empty rather than absent: the shell's variable is for programs without a configuration.
            TRACE_ENV: str(self._trace or ""),
            TRACE_LIMIT_ENV: str(section.trace_limit_mib),
            PROFILE_ENV: profile.model_dump_json() if profile.steps else "",
            REPORT_FILE_ENV: str(self._reports),
        }
        """Environment variables for the other processes of the run."""

    def __enter__(self) -> RunHooks:
        with ExitStack() as stack:
            before = {name: os.environ.get(name) for name in self.environment}
            stack.callback(_set_environment, before)
            _set_environment(self.environment)
            hooks = make_hooks(self._own)
            stack.callback(self._say_reports, hooks, len(reported_in(self._reports)))
            if self._trace is not None:
                stack.callback(self._merge, self._trace)
                hooks.register(TraceObserver(self._trace, self._section.trace_limit_mib), "trace")
            if self._tensorboard is not None:
                tensorboard = TensorBoardObserver(self._tensorboard)
                stack.callback(tensorboard.close)
                hooks.register(tensorboard, "tensorboard")
            if self._section.prometheus_port is not None:
                prometheus, url = metrics_endpoint(self._section.prometheus_port, self._section.prometheus_host)
                stack.callback(prometheus.close)
                self._say(f"metrics for Prometheus: {url}")
                hooks.register(prometheus, "prometheus")
            for name in TRACKERS:
                if (project := getattr(self._section, name)) is not None:
                    tracker = self._tracker(name, project)
                    stack.callback(self._close_tracker, name, tracker)
                    hooks.register(tracker, name)
            self._stack = stack.pop_all()
        return hooks

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _tracker(self, name: str, project: str) -> TrackerObserver:
        """Begin the tracker's run, so that a tracker that cannot log is an error before any process starts."""
        tracker = TRACKERS[name](project, self._run_dir.name, self._settings, self._run_dir)
        try:
            within(_TRACKER_S, tracker.open)
        except Exception as error:
            raise ConfigError(
                f"cannot log to {name}: {type(error).__name__}: {str(error).strip().rstrip('.')}.",
                part=f"observers.{name}",
                hint=f"Log in to {name}, set the variables that it reads, or leave observers.{name} out.",
            ) from error
        return tracker

    def _close_tracker(self, name: str, tracker: TrackerObserver) -> None:
        try:
            within(_TRACKER_S, tracker.close)
        except Exception as error:  # noqa: BLE001 - the run is over, and its own files are whole
            self._say(f"{name} did not take everything: {type(error).__name__}: {error}")

    def _merge(self, trace: Path) -> None:
        try:
            merged = merge(trace)
        except OSError as error:
            self._say(f"the trace could not be written: {error}. Its parts are kept in {parts_dir(trace)}")
            return
        if merged is not None:
            self._say(f"trace of {merged.processes} processes, {merged.events} events: {merged.path}")
            if merged.incomplete:
                self._say(
                    f"the trace is incomplete: observers.trace_limit_mib was reached by {', '.join(merged.incomplete)}"
                )

    def _say_reports(self, hooks: RunHooks, earlier: int) -> None:
        """Print each report of a disabled plugin once, even if every process of the run has it."""
        for text in dict.fromkeys([*map(str, hooks.reports), *reported_in(self._reports)[earlier:]]):
            self._say(f"{text} (details: {self._reports})")


def _set_environment(values: dict[str, str] | dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _without_keys(settings: Any) -> Any:
    """Leave out options of stores, and those that are named as secrets are: trackers show settings to others."""
    if isinstance(settings, Mapping):
        return {name: _without_keys(value) for name, value in settings.items() if not _SECRET.search(name)}
    return [_without_keys(each) for each in settings] if isinstance(settings, list | tuple) else settings
