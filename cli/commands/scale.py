"""``weightlane scale`` asks a run that trains for another number of rollout replicas, and waits until it has them."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from weightlane.ckpt_engines import ClosedError, ConfigError, Deadline, PeerLostError, WorkerDiedError
from weightlane.trainer.runner.run_dir import is_in_use, write_whole

from ..fleet.scale_files import RECORD, REQUEST, FleetRecord, ScaleRequest, read_file

_PART = "scale"
_POLL_S = 0.25
_SILENT_S = 120.0
"""Seconds after which a run that shows no sign of life is taken for dead. A shared file system may be a minute late."""
_STAGES = {
    "starting": "starts",
    "joining": "has started, and waits for the serving version",
    "serving": "serves",
    "leaving": "gets no new requests, and finishes those it has",
}
_WENT_ON = "The run goes on with the replicas that it has."


def scale_run(run: Path, replicas: int, timeout_s: float, say: Callable[[str], None], *, wait: bool = True) -> None:
    """Ask the run in the directory `run` for `replicas`. With `wait`, return once so many serve, and no other one is left.

    `say` prints a line for the user.

    Raises:
        ConfigError: No run trains there, or it refuses the number, or another command has asked it for another one.
        WorkerDiedError: A replica could not start, or has died and is not replaced.
        PeerLostError: The run does not answer, or its process is gone.
        ClosedError: The run has ended meanwhile.
        DeadlineExceededError: The fleet has not changed within `timeout_s` seconds.
        StorageError: Nothing can be written in the run's directory.
    """
    deadline = Deadline.after(timeout_s)
    watched = _WatchedRun(run)
    before = watched.record
    request = ScaleRequest(key=secrets.token_hex(8), replicas=replicas)
    write_whole(run / REQUEST, request.model_dump_json())
    shown = _stages(before)
    while True:
        record = watched.read()
        shown = _tell_changes(shown, _stages(record), say)
        if record.request == request.key:
            before = record
            if not wait and not record.refused:
                say(f"{len(record.serving)} replicas serve, and the run changes that to {replicas}")
                return
            if _is_done(record, replicas):
                say(f"{replicas} replicas serve: {', '.join(sorted(record.serving))}")
                return
        elif record.request != before.request:
            raise ConfigError(
                "another command has asked the run for another number meanwhile.", part=_PART, hint="Ask again."
            )
        if deadline.expired:
            waited_for = f"{replicas} replicas to serve, of which {len(record.serving)} do"
            raise deadline.error(
                waited_for, part=_PART, hint="The run goes on with the change. Ask again to wait for it."
            )
        time.sleep(_POLL_S)


def _is_done(record: FleetRecord, replicas: int) -> bool:
    """Whether the run has as many `replicas` as it was asked for. Raises the error of one that will not have them."""
    if record.refused:
        raise ConfigError(f"the run refuses: {record.refused}", part=_PART)
    if len(record.serving) == replicas == record.wanted and not record.leaving:
        return True
    if record.failed:
        raise WorkerDiedError(record.failed, part=_PART, hint=_WENT_ON)
    if record.missing:
        names = ", ".join(record.missing)
        raise WorkerDiedError(f"{names} died meanwhile, and nobody replaces it.", part=_PART, hint=_WENT_ON)
    return False


class _WatchedRun:
    """The record of a run that lives. Raises `ConfigError` if none trains in the directory `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not (path / "state").is_dir():
            raise ConfigError(
                f"{path} is not the directory of a run.", part=_PART, hint="Name the run.dir of its configuration."
            )
        record = read_file(FleetRecord, path / RECORD)
        if record is None and is_in_use(path):
            raise ConfigError(
                f"the run in {path} does not train: it still starts, or is about to end, or has no rollouts.",
                part=_PART,
                hint="Ask again once it prints steps.",
            )
        if record is None:
            raise ConfigError(f"no run trains in {path}: it has ended.", part=_PART, hint="Begin with --resume.")
        self.record = record
        self._beats_by = Deadline.after(_SILENT_S)
        self._raise_if_gone(ConfigError)

    def read(self) -> FleetRecord:
        """Read the record. Raises `ClosedError` if the run has ended, and `PeerLostError` if it lives no more."""
        record = read_file(FleetRecord, self._path / RECORD)
        if record is None:
            raise ClosedError(f"the run in {self._path} has ended meanwhile.", part=_PART)
        if record.beat != self.record.beat:
            self._beats_by = Deadline.after(_SILENT_S)
        self.record = record
        self._raise_if_gone(PeerLostError)
        return record

    def _raise_if_gone(self, kind: type[ConfigError | PeerLostError]) -> None:
        process = f"process {self.record.pid} on {self.record.host}"
        if self.record.host == socket.gethostname() and not is_in_use(self._path):
            raise kind(f"the run in {self._path} is gone: its {process} was killed.", part=_PART, hint="Use --resume.")
        if self._beats_by.expired:
            raise PeerLostError(
                f"the run in {self._path} has not answered for {_SILENT_S:.0f} s.",
                part=_PART,
                peer=process,
                hint="See whether that process lives, and whether both machines see the same files.",
            )


def _stages(record: FleetRecord) -> dict[str, str]:
    """The stage of each replica, by its name."""
    return {name: stage for stage in _STAGES for name in getattr(record, stage)}


def _tell_changes(before: dict[str, str], now: dict[str, str], say: Callable[[str], None]) -> dict[str, str]:
    """Print what has become of each replica, and return `now`."""
    for name, stage in now.items():
        if before.get(name) != stage:
            say(f"{name} {_STAGES[stage]}")
    for name, stage in before.items():
        if name not in now:
            say(f"{name} {'has left' if stage == 'leaving' else 'is gone'}")
    return now
