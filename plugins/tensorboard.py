"""An observer that writes scalars for TensorBoard with tensorboardX, which needs neither TensorBoard nor TensorFlow."""

from __future__ import annotations

import importlib
import math
import threading
from pathlib import Path
from typing import Any

from .hooks import Facts, hookimpl

TENSORBOARD_ENV = "WEIGHTLANE_TENSORBOARD"
"""Environment variable with the directory of the event files."""


class TensorBoardObserver:
    """Writes the events of the driver's hooks to an event file in `directory`, which the first event creates.

    Curves over optimizer steps are called ``train/...`` and ``eval/...``, those over weight versions ``sync/...``.

    Raises `ImportError` if tensorboardX is not installed (extra ``observability``).
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._make: Any = importlib.import_module("tensorboardX").SummaryWriter
        self._writer: Any = None
        self._lock = threading.Lock()

    @hookimpl
    def training_step(self, step: int, facts: Facts) -> None:
        """Write every number of the step."""
        self._add(
            "train", step, {key: value for key, value in facts.items() if key not in ("seconds", "published_version")}
        )

    @hookimpl
    def evaluated(self, step: int, facts: Facts) -> None:
        """Write the accuracy, or the mean log-probability."""
        self._add("eval", step, {key: facts.get(key) for key in ("accuracy", "mean_logprob")})

    @hookimpl
    def version_committed(self, version: int, facts: Facts) -> None:
        """Write the cost of the version, and the times of every replica."""
        replicas = facts.get("replicas", {}).items()
        per_replica = {f"{name}/{key}": value for name, replica in replicas for key, value in replica.items()}
        self._add("sync", version, {**facts, **per_replica, "aborted": 0})

    @hookimpl
    def version_aborted(self, version: int, facts: Facts) -> None:
        """Write a one to the curve ``sync/aborted``, and the reason as text."""
        self._add("sync", version, {"aborted": 1}, {"abort reason": str(facts.get("error", ""))})

    @hookimpl
    def replica_quarantined(self, replica: str, facts: Facts) -> None:
        """Write the reason as text."""
        self._add("sync", int(facts.get("version", -1)), {}, {f"{replica}/quarantined": str(facts.get("error", ""))})

    @hookimpl
    def run_ended(self) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Write the remaining events and close the file. Idempotent; a later event starts another file."""
        with self._lock:
            writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _add(self, group: str, step: int, facts: dict[str, Any], texts: dict[str, str] | None = None) -> None:
        with self._lock:
            if self._writer is None:
                self._writer = self._make(str(self._directory))
            for key, value in facts.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    self._writer.add_scalar(f"{group}/{key}", value, step)
            for key, text in (texts or {}).items():
                self._writer.add_text(f"{group}/{key}", text, step)


def tensorboard_from_environment(directory: str) -> TensorBoardObserver:
    """Make the observer for a value of `TENSORBOARD_ENV`."""
    return TensorBoardObserver(Path(directory))
