"""Observers that write a run's files: ``metrics.jsonl``, ``samples.jsonl``, ``failures.jsonl`` and ``curves.png``."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import StorageError
from weightlane.plugins import hookimpl


def append_line(path: Path, facts: Mapping[str, Any]) -> int:
    """Append `facts` and the time as a line of JSON. Returns the size of the file afterwards, in bytes."""
    line = json.dumps({"time": round(time.time(), 3), **facts})
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            return file.tell()
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}.", part="metrics") from error


class FailuresFile:
    """Appends every sample and step that fails to a JSON Lines file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @hookimpl
    def item_failed(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Write a line about the failure."""
        append_line(self._path, {"kind": kind, **facts})


class SamplesFile:
    """Appends some completions of every step, with their rewards, to a JSON Lines file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @hookimpl
    def samples_trained(self, step: int, facts: Mapping[str, Any]) -> None:
        """Write a line per sample."""
        for sample in facts["samples"]:
            append_line(self._path, {"step": step, **sample})


class MetricsFile:
    """Appends every event of a run to a JSON Lines file, as it happens.

    When the file has `most_bytes`, it is renamed to ``<path>.1``, replacing an earlier one, and a new one begins; None, as in a
    run, which ends: no limit.
    """

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._path = path
        self._most_bytes = most_bytes

    def _write(self, event: str, facts: Mapping[str, Any], **more: Any) -> None:
        size = append_line(self._path, {"event": event, **more, **facts})
        if self._most_bytes is not None and size >= self._most_bytes:
            self._path.replace(f"{self._path}.1")

    @hookimpl
    def run_started(self, facts: Mapping[str, Any]) -> None:
        """Write a line where a run begins or resumes from a saved step. Lines above it about later steps are then obsolete."""
        self._write("run_started", facts)

    @hookimpl
    def training_step(self, step: int, facts: Mapping[str, Any]) -> None:
        """Write a line per optimizer step."""
        self._write("training_step", facts, step=step)

    @hookimpl
    def version_committed(self, version: int, facts: Mapping[str, Any]) -> None:
        """Write a line per committed version."""
        self._write("version_committed", facts, version=version)

    @hookimpl
    def version_aborted(self, version: int, facts: Mapping[str, Any]) -> None:
        """Write a line per aborted version."""
        self._write("version_aborted", facts, version=version)

    @hookimpl
    def replica_quarantined(self, replica: str, facts: Mapping[str, Any]) -> None:
        """Write a line per replica taken out of service."""
        self._write("replica_quarantined", facts, replica=replica)

    @hookimpl
    def replica_lost(self, replica: str, facts: Mapping[str, Any]) -> None:
        """Write a line per replica that died."""
        self._write("replica_lost", facts, replica=replica)

    @hookimpl
    def replica_joined(self, replica: str, facts: Mapping[str, Any]) -> None:
        """Write a line per replica that serves since some time of the run."""
        self._write("replica_joined", facts, replica=replica)

    @hookimpl
    def replica_left(self, replica: str, facts: Mapping[str, Any]) -> None:
        """Write a line per replica that has left."""
        self._write("replica_left", facts, replica=replica)

    @hookimpl
    def turn_ended(self, turn: str, facts: Mapping[str, Any]) -> None:
        """Write a line per turn on devices that trainers and rollouts share."""
        self._write("turn_ended", facts, turn=turn)

    @hookimpl
    def evaluated(self, step: int, facts: Mapping[str, Any]) -> None:
        """Write a line per evaluation."""
        self._write("evaluated", facts, step=step)

    @hookimpl
    def run_ended(self, facts: Mapping[str, Any]) -> None:
        """Write the last line."""
        self._write("run_ended", facts)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The events of a `MetricsFile`, without those after a step from which the run was resumed.

    A line that is no event, such as one that is being written, is left out. Without a file, there are no events.
    Raises `StorageError` if the file can't be read.
    """
    left: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                event = _event(line)
                if event is None:
                    continue
                if event["event"] == "run_started":
                    left = [each for each in left if each.get("step", each.get("version", 0)) <= event["step"]]
                left.append(event)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}.", part="metrics") from error
    return left


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) and "time" in event else None


def draw_curves(metrics: Path, picture: Path) -> None:
    """Draw reward, staleness and sync times of a run's metrics file."""
    # If matplotlib builds its font cache slowly, it would say so on standard error.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    import matplotlib as mpl  # noqa: PLC0415 - optional, and slow to import

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    events = read_metrics(metrics)
    steps = [event for event in events if event["event"] == "training_step"]
    commits = [event for event in events if event["event"] == "version_committed"]
    evaluations = [event for event in events if event["event"] == "evaluated"]

    figure, (reward, lag, times) = plt.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
    at = [event["step"] for event in steps]
    reward.plot(at, [event["reward"] for event in steps], label="reward of the batch (sampled)")
    reward.plot(
        [event["step"] for event in evaluations],
        [event["accuracy"] for event in evaluations],
        "o--",
        label="held-out accuracy (greedy)",
    )
    reward.set_ylabel("mean reward")
    reward.legend(loc="lower right")
    lag.plot(at, [event["staleness_mean"] for event in steps], label="mean")
    lag.plot(at, [event["staleness_max"] for event in steps], label="max")
    lag.set_ylabel("staleness (versions)")
    lag.set_ylim(bottom=-0.1)
    lag.legend(loc="lower right")
    versions = [event["version"] for event in commits]
    times.plot(versions, [1e3 * event["latency_s"] for event in commits], label="sync latency")
    times.plot(versions, [1e3 * event["rollout_blocked_s"] for event in commits], label="rollout blocked")
    times.plot(at, [1e3 * event["fence_s"] for event in steps], label="trainer blocked (fence)")
    times.set_yscale("symlog", linthresh=1.0)
    times.set_ylabel("milliseconds")
    times.set_xlabel("optimizer step = weight version")
    times.legend(loc="center right")
    figure.savefig(picture, dpi=120)
    plt.close(figure)
