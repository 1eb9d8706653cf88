"""Observers that log a run to an experiment tracker: Weights & Biases, MLflow, or trackio.

Each tracker reads its own environment variables for its server, the user's account, and work without a connection
(``WANDB_MODE=offline``, ``MLFLOW_TRACKING_URI``, ``TRACKIO_DIR``).
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import importlib
import io
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .curves import CurvesObserver
from .hooks import Facts, hookimpl

WANDB_ENV, MLFLOW_ENV, TRACKIO_ENV = "WEIGHTLANE_WANDB", "WEIGHTLANE_MLFLOW", "WEIGHTLANE_TRACKIO"
"""Environment variables with the name of the project; for MLflow, of the experiment."""
_LOGIN_S = 30
"""Longest time, in seconds, that W&B waits on a terminal for a login."""
_PARAMS_PER_CALL = 100
_PARAM_CHARACTERS = 6000
"""MLflow's limits: parameters per call, and characters per parameter or tag."""


class TrackerObserver(CurvesObserver):
    """Logs curves and texts as a run of a tracker. `open` or the first event begins the run, and `close` ends it.

    Args:
        project: The tracker's project, or experiment; made if there is none.
        name: Name of the run.
        settings: Settings of the run for the tracker to show; JSON can represent them.
        directory: Directory for the tracker's files of the run. Only W&B keeps such files.

    Raises `ImportError` if the tracker is not installed (extra ``trackers``).
    """

    library: ClassVar[str]
    """Name of the tracker's module."""

    def __init__(
        self, project: str, name: str, settings: Mapping[str, Any] | None = None, directory: Path | None = None
    ) -> None:
        super().__init__()
        self._project, self._name, self._settings = project, name, dict(settings or {})
        self._directory = directory
        self._failed = False
        self._module: Any = importlib.import_module(self.library)

    @hookimpl
    def run_ended(self, facts: Facts) -> None:
        """Record whether the run failed; `close` reports it to the tracker."""
        self._failed = "error" in facts


class WandbObserver(TrackerObserver):
    """Logs to Weights & Biases. Curves over versions have ``sync/version`` as their axis."""

    library = "wandb"

    def _open(self) -> Any:
        run = self._module.init(
            project=self._project,
            name=self._name,
            group=self._name,
            config=self._settings,
            dir=None if self._directory is None else str(self._directory),
            reinit="create_new",  # whatever else this process logs
            settings=self._module.Settings(silent=True, console="off", login_timeout=_LOGIN_S),
        )
        for group, axis in (("train", "step"), ("eval", "step"), ("sync", "version")):
            run.define_metric(f"{group}/*", step_metric=f"{group}/{axis}")
        return run

    def _write(self, writer: Any, step: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        group = next(iter({**numbers, **texts})).partition("/")[0]
        writer.log({**numbers, **texts, f"{group}/{'version' if group == 'sync' else 'step'}": step})

    def _close(self, writer: Any) -> None:
        writer.finish(exit_code=int(self._failed))


@dataclass(slots=True)
class _MlflowRun:
    client: Any
    id: str
    last: Any = None
    """The newest asynchronous call, which may still be running."""


class MlflowObserver(TrackerObserver):
    """Logs to MLflow. Texts are tags; a later text replaces an earlier one of the same name."""

    library = "mlflow"

    def _open(self) -> Any:
        client = self._module.MlflowClient()
        found = client.get_experiment_by_name(self._project)
        experiment = client.create_experiment(self._project) if found is None else found.experiment_id
        run = _MlflowRun(client, client.create_run(experiment, run_name=self._name).info.run_id)
        entities = self._module.entities
        params = [entities.Param(key, value[:_PARAM_CHARACTERS]) for key, value in _flat(self._settings)]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            client.log_batch(run.id, params=params[start : start + _PARAMS_PER_CALL])
        return run

    def _write(self, writer: Any, step: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        entities, now = self._module.entities, int(1e3 * time.time())
        metrics = [entities.Metric(name, value, now, step) for name, value in numbers.items()]
        tags = [entities.RunTag(name, text[:_PARAM_CHARACTERS]) for name, text in texts.items()]
        writer.last = writer.client.log_batch(writer.id, metrics=metrics, tags=tags, synchronous=False)

    def _close(self, writer: Any) -> None:
        try:
            if writer.last is not None:
                writer.last.wait()
        finally:
            writer.client.set_terminated(writer.id, "FAILED" if self._failed else "FINISHED")


class TrackioObserver(TrackerObserver):
    """Logs to trackio."""

    library = "trackio"

    def _open(self) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):  # how to start its dashboard
            return contextvars.Context().run(  # elsewhere the process may have a current run of its own
                self._module.init, self._project, name=self._name, config=self._settings, resume="never", embed=False
            )

    def _write(self, writer: Any, step: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        writer.log({**numbers, **texts}, step=step)

    def _close(self, writer: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            writer.finish()


TRACKERS: Mapping[str, type[TrackerObserver]] = {
    "wandb": WandbObserver,
    "mlflow": MlflowObserver,
    "trackio": TrackioObserver,
}
"""Every tracker, by the name that configurations use."""


def tracker_from_environment(name: str) -> Callable[[str], TrackerObserver]:
    """Return a function that makes tracker `name` for a project, which its variable names. The run ends with the process."""

    def make(project: str) -> TrackerObserver:
        tracker = TRACKERS[name](project, "weightlane")
        atexit.register(tracker.close)
        return tracker

    return make


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as pairs of a dotted name and a text."""
    found: list[tuple[str, str]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return found
