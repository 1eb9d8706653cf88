"""`JobFiles`: a queue of jobs in a directory.

Any number of processes of one machine may submit and take jobs. A job is a file whose name is its number. The folder of the file
is the job's state:

- ``partial/``: being written
- ``queued/``: waiting for its turn
- ``taken/``: being executed, and locked (flock) by the executing process
- ``failed/``: set aside, with the reason in a JSON file next to it
- ``executed/``: kept to be executed again by the next worker, see `JobWorker`; also jobs that failed

A file changes folders by a rename, so it is in exactly one of them whenever a process is killed. The kernel releases the lock of
a process that has ended; by that, `recover` finds the jobs that the process had taken. A job that is done and need not be
executed again is deleted. ``results/`` has the results, until `forget_result`; ``events.jsonl`` what workers have reported.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import Deadline, DeadlineExceededError, StorageError, WeightlaneError

from .file_observers import append_line
from .job_codec import decode_job, decode_result, encode_job, encode_result
from .job_queue.contract import FailedJob, Finished, JobQueue, reason_of
from .jobs import Job

_PART = "job files"
_EVENTS = "events.jsonl"
_FOLDERS = ("partial", "queued", "taken", "failed", "executed", "results")
_NUMBERING_S = 30.0
"""Seconds in which the other processes have to finish numbering their jobs; each needs milliseconds."""
_POLL_S = 0.005
_TRIES = 10
"""Attempts to write a file, which another process may delete as one that a dead process left."""


class TakenFile:
    """A job of a directory that this process executes: see `TakenJob`."""

    def __init__(self, folder: Path, name: str, job: Job[Any], lock: int) -> None:
        self.name, self.job = name, job
        self._folder, self._lock = folder, lock

    def done(self, *, repeat: bool = False) -> None:
        """See `TakenJob.done`."""
        with _storage(self._folder):
            path = self._folder / "taken" / self.name
            if repeat:
                path.rename(self._folder / "executed" / self.name)
            else:
                path.unlink()
            os.close(self._lock)

    def fail(self, error: WeightlaneError, *, repeat: bool = False) -> None:
        """See `TakenJob.fail`."""
        with _storage(self._folder):
            if repeat:
                with suppress(FileExistsError):
                    (self._folder / "executed" / self.name).hardlink_to(self._folder / "taken" / self.name)
            _set_aside(self._folder, self.name, error)
            os.close(self._lock)

    def requeue(self) -> None:
        """See `TakenJob.requeue`."""
        with _storage(self._folder):
            (self._folder / "taken" / self.name).rename(self._folder / "queued" / self.name)
            os.close(self._lock)


class JobFiles(JobQueue):
    """The jobs in a directory, which is made if there is none.

    It is on a file system of this machine, or one whose locks (flock) hold between all processes that use it. Every method raises
    `StorageError` if the file system refuses.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = Path(directory)
        with _storage(self._folder):
            for name in _FOLDERS:
                (self._folder / name).mkdir(parents=True, exist_ok=True)

    def submit(self, job: Job[Any]) -> str:
        """See `JobQueue.submit`. Raises `DeadlineExceededError` if another process holds the numbering lock for too long."""
        data = encode_job(job)
        with _storage(self._folder):
            for _ in range(_TRIES):
                if name := self._submitted(data):
                    return name
        raise StorageError(f"files in {self._folder} vanish while they are written.", part=_PART)

    def take(self) -> TakenFile | None:
        """Take the first waiting job; None if there is none. No other process gets it, unless it is queued again.

        A damaged file is set aside.
        """
        with _storage(self._folder):
            for name in self.waiting():
                lock = _lock(self._folder / "queued" / name)
                if lock is None:  # another process takes it
                    continue
                try:
                    (self._folder / "queued" / name).rename(self._folder / "taken" / name)
                except OSError as error:
                    os.close(lock)
                    if isinstance(error, FileNotFoundError):  # another process took it before
                        continue
                    raise
                if taken := self._read(name, lock):
                    return taken
        return None

    def recover(self) -> list[TakenFile]:
        """Take the jobs of processes that ended while executing them, in order. The caller decides about each.

        Files that were being written by such processes are deleted.
        """
        with _storage(self._folder):
            for path in (self._folder / "partial").iterdir():
                if (lock := _lock(path)) is not None:
                    path.unlink(missing_ok=True)
                    os.close(lock)
            found = []
            for name in _names(self._folder / "taken"):
                path = self._folder / "taken" / name
                lock = _lock(path)
                if lock is None:
                    continue
                if not path.exists():  # it was finished meanwhile
                    os.close(lock)
                elif taken := self._read(name, lock):
                    found.append(taken)
            return found

    def waiting(self) -> list[str]:
        """See `JobQueue.waiting`."""
        with _storage(self._folder):
            return _names(self._folder / "queued")

    def failed(self) -> list[FailedJob]:
        """See `JobQueue.failed`."""
        with _storage(self._folder):
            names = _names(self._folder / "failed")
            return [FailedJob(name, _reason(self._folder / "failed" / f"{name}.json")) for name in names]

    def take_turn(self) -> Callable[[], None] | None:
        """See `JobQueue.take_turn`."""
        with _storage(self._folder):
            (self._folder / "worker").touch()
            lock = _lock(self._folder / "worker")
        return None if lock is None else partial(os.close, lock)

    def executed(self) -> Iterator[tuple[str, Job[Any]]]:
        """See `JobQueue.executed`.

        A job whose worker ended while setting it aside is left out: `recover` has it.
        """
        with _storage(self._folder):
            for name in sorted({*_names(self._folder / "executed")} - {*_names(self._folder / "taken")}):
                yield name, decode_job((self._folder / "executed" / name).read_bytes())

    def check_turn(self) -> None:
        """See `JobQueue.check_turn`. The kernel keeps the lock for as long as the process lives."""

    def forget_executed(self, names: Sequence[str]) -> None:
        """See `JobQueue.forget_executed`."""
        with _storage(self._folder):
            for name in names:
                (self._folder / "executed" / name).unlink()

    def write_event(self, facts: Mapping[str, Any]) -> None:
        """See `JobQueue.write_event`: a line of ``events.jsonl``."""
        append_line(self._folder / _EVENTS, facts)

    def events(self) -> list[dict[str, Any]]:
        """See `JobQueue.events`."""
        with _storage(self._folder):
            path = self._folder / _EVENTS
            return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def note(self, name: str) -> dict[str, Any]:
        """See `JobQueue.note`."""
        with _storage(self._folder):
            path = self._folder / f"{name}.json"
            found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
            return found

    def write_note(self, name: str, facts: Mapping[str, Any]) -> None:
        """See `JobQueue.write_note`."""
        with _storage(self._folder):
            self._write(f"{name}.json", json.dumps(facts).encode())

    def write_result(self, name: str, result: Any) -> None:
        """See `JobQueue.write_result`."""
        with _storage(self._folder):
            self._write(f"results/{name}", encode_result(result))

    def finished(self, name: str) -> Finished | None:
        """See `JobQueue.finished`."""
        with _storage(self._folder):
            reason = self._folder / "failed" / f"{name}.json"
            if reason.exists():
                raise _reason(reason)
            try:
                return Finished(decode_result((self._folder / "results" / name).read_bytes()))
            except FileNotFoundError:
                return None

    def forget_result(self, name: str) -> None:
        """See `JobQueue.forget_result`."""
        with _storage(self._folder):
            (self._folder / "results" / name).unlink(missing_ok=True)

    def _write(self, name: str, data: bytes) -> None:
        """Write a file so that it appears completely or not at all, also if the machine crashes."""
        path = self._folder / name
        unfinished = path.with_name(f".{path.name}.partial")
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        _sync(path.parent)

    def _submitted(self, data: bytes) -> str:
        """Write and queue a file. Returns its name; empty if `recover` deleted the file before it was locked."""
        written = self._folder / "partial" / f"{os.getpid()}-{time.monotonic_ns()}"
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with suppress(BlockingIOError):  # `recover` has it, and deletes it
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            with self._numbering() as number:
                name = f"{number:012d}.job"
                try:
                    written.rename(self._folder / "queued" / name)
                except FileNotFoundError:
                    return ""
                os.close(descriptor)  # before the next job is numbered, because `take` skips a locked job
                descriptor = -1
            _sync(self._folder / "queued")
            return name
        finally:
            if descriptor >= 0:
                written.unlink(missing_ok=True)
                os.close(descriptor)

    @contextmanager
    def _numbering(self) -> Iterator[int]:
        """Hold the directory's lock inside the block, and yield the next number."""
        descriptor = os.open(self._folder / "numbering", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = Deadline.after(_NUMBERING_S)
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if deadline.expired:
                        raise DeadlineExceededError(
                            f"another process has been numbering its job in {self._folder} for {_NUMBERING_S:.0f} s.",
                            part=_PART,
                            hint="Look for one that was stopped.",
                        ) from None
                    time.sleep(_POLL_S)
            # Names are of one length, so that the last one is the largest. After a crash of the machine the file may be empty.
            last = max((name for folder in _FOLDERS[1:] for name in _names(self._folder / folder)), default="0")
            written = os.pread(descriptor, 32, 0).decode("ascii", "replace")
            number = 1 + max(_number(last), _number(written))
            os.pwrite(descriptor, f"{number:012d}".encode(), 0)
            yield number
        finally:
            os.close(descriptor)

    def _read(self, name: str, lock: int) -> TakenFile | None:
        """Read a locked job in ``taken/``. If it is damaged, set it aside and return None."""
        try:
            return TakenFile(self._folder, name, decode_job((self._folder / "taken" / name).read_bytes()), lock)
        except WeightlaneError as error:
            _set_aside(self._folder, name, error)
            os.close(lock)
            return None


def _set_aside(folder: Path, name: str, error: WeightlaneError) -> None:
    """Move a job from ``taken/`` to ``failed/``. The reason is written first."""
    reason = folder / "failed" / f"{name}.json"
    unfinished = reason.with_suffix(".partial")
    unfinished.write_text(json.dumps({"time": round(time.time(), 3), **error.to_wire()}) + "\n")
    unfinished.replace(reason)
    (folder / "taken" / name).rename(folder / "failed" / name)


def _reason(path: Path) -> WeightlaneError:
    try:
        return reason_of(json.loads(path.read_text()), str(path))
    except (OSError, ValueError, RecursionError):
        return reason_of(None, str(path))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.job"))


def _number(text: str) -> int:
    digits = text.partition(".")[0]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def _lock(path: Path) -> int | None:
    """Lock a file; None if another process holds its lock, or it is gone. Returns the descriptor; closing it unlocks the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _sync(folder: Path) -> None:
    """Flush the names in `folder` to disk, so that they survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _storage(folder: Path) -> Iterator[None]:
    try:
        yield
    except WeightlaneError:
        raise
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be used: {error.strerror or error}.",
            part=_PART,
            hint="Free space, or choose another one.",
        ) from error
