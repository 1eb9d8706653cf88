"""`CurvesObserver`: the driver's hooks as numbers and texts over optimizer steps and weight versions."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from .hooks import Facts, hookimpl


def is_measure(fact: str) -> bool:
    """Whether a fact of `RunHooks.evaluated` says how good the model is."""
    return fact.startswith(("accuracy", "pass_at_", "mean_logprob"))


def measure_name(fact: str) -> str:
    """Return the name of such a fact for people: ``pass_at_4_math`` is ``pass@4 math``."""
    kind, _, heldout = fact.removeprefix("pass_at_").partition("_")
    return f"{'pass@' if fact.startswith('pass_at_') else ''}{kind} {heldout}".strip()


class CurvesObserver(ABC):
    """Writes the events of the driver's hooks with a writer that a subclass makes. The first event opens the writer.

    Curves over optimizer steps are called ``train/...`` and ``eval/...``, those over weight versions ``sync/...``.
    """

    def __init__(self) -> None:
        self._writer: Any = None
        self._lock = threading.Lock()

    @hookimpl
    def training_step(self, step: int, facts: Facts) -> None:
        """Write every number of the step except ``seconds`` and ``published_version``."""
        self._add(
            "train", step, {key: value for key, value in facts.items() if key not in ("seconds", "published_version")}
        )

    @hookimpl
    def evaluated(self, step: int, facts: Facts) -> None:
        """Write what was measured: accuracies, pass@k, or the mean log-probability."""
        self._add("eval", step, {key: value for key, value in facts.items() if is_measure(key)})

    @hookimpl
    def version_committed(self, version: int, facts: Facts) -> None:
        """Write every number of the version and of its replicas, and a zero to the curve ``sync/aborted``."""
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

    def open(self) -> None:
        """Open the writer, as the first event does. Idempotent."""
        with self._lock:
            self._opened()

    def close(self) -> None:
        """Write the pending data and close the writer. Idempotent; a later event opens a new writer."""
        with self._lock:
            writer, self._writer = self._writer, None
        if writer is not None:
            self._close(writer)

    def _add(self, group: str, step: int, facts: Mapping[str, Any], texts: Mapping[str, str] | None = None) -> None:
        numbers = {
            f"{group}/{key}": float(value)
            for key, value in facts.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        named = {f"{group}/{key}": text for key, text in (texts or {}).items()}
        if numbers or named:
            with self._lock:
                self._write(self._opened(), step, numbers, named)

    def _opened(self) -> Any:
        if self._writer is None:
            self._writer = self._open()
        return self._writer

    @abstractmethod
    def _open(self) -> Any:
        """Return a new writer, which `_write` and `_close` get."""

    @abstractmethod
    def _write(self, writer: Any, step: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Write finite numbers and texts, by the names of their curves, without blocking."""

    @abstractmethod
    def _close(self, writer: Any) -> None:
        """Write the pending data and close `writer`."""
