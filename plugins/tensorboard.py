"""Scalars of a run for TensorBoard, by tensorboardX: the format needs neither TensorBoard nor TensorFlow to be written."""

from __future__ import annotations

import importlib
import math
import threading
from pathlib import Path
from typing import Any

from .hooks import Facts, hookimpl

TENSORBOARD_ENV = "WEIGHTLANE_TENSORBOARD"
"""Directory of the event files."""


class TensorBoardObserver:
    """Writes what the driver's hooks tell to an event file in `directory`, which it makes at the first event.

    Curves over optimizer steps are called ``train/...`` and ``eval/...``, those over weight versions ``sync/...``.

    Raises `ImportError` when tensorboardX is not installed (extra ``observability``).
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._make: Any = importlib.import_module("tensorboardX").SummaryWriter
        self._writer: Any = None
        self._lock = threading.Lock()

    @hookimpl
    def training_step(self, step: int, facts: Facts) -> None:
        """Every number of the step."""
        self._add(
            "train", step, {key: value for key, value in facts.items() if key not in ("seconds", "published_version")}
        )

    @hookimpl
    def evaluated(self, step: int, facts: Facts) -> None:
        """The accuracy."""
        self._add("eval", step, {"accuracy": facts.get("accuracy")})

    @hookimpl
    def version_committed(self, version: int, facts: Facts) -> None:
        """What the version cost, and the times of every replica."""
        replicas = facts.get("replicas", {}).items()
        per_replica = {f"{name}/{key}": value for name, replica in replicas for key, value in replica.items()}
        self._add("sync", version, {**facts, **per_replica, "aborted": 0})

    @hookimpl
    def version_aborted(self, version: int, facts: Facts) -> None:
        """A one on the curve ``sync/aborted``, and the reason as text."""
        self._add("sync", version, {"aborted": 1}, {"abort reason": str(facts.get("error", ""))})

    @hookimpl
    def replica_quarantined(self, replica: str, facts: Facts) -> None:
        """The reason as text."""
        self._add("sync", int(facts.get("version", -1)), {}, {f"{replica}/quarantined": str(facts.get("error", ""))})

    @hookimpl
    def run_ended(self) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Write what is still to be written. Idempotent; a later event begins another file."""
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
    """The observer that `TENSORBOARD_ENV` asks for."""
    return TensorBoardObserver(Path(directory))
