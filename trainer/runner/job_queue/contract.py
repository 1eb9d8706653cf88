"""`JobQueue`: jobs that any number of programs submit, and one worker at a time executes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weightlane.ckpt_engines import Deadline, StorageError, WeightlaneError, error_from_wire

from ..jobs import Job

LEASE_S = 30.0
"""Time after which another worker takes over from one that does not answer: longer than a store's usual hiccups."""
_PART = "jobs"


@dataclass(frozen=True, slots=True)
class FailedJob:
    """A job that was set aside."""

    name: str
    error: WeightlaneError
    """The reason."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that was executed."""

    result: Any


class TakenJob(Protocol):
    """A job that this process executes, until it calls one of `done`, `fail` and `requeue`, or ends."""

    name: str
    job: Job[Any]

    def done(self, *, repeat: bool = False) -> None:
        """End the job after its execution. With `repeat` it is kept for `JobQueue.executed`."""

    def fail(self, error: WeightlaneError, *, repeat: bool = False) -> None:
        """Set the job aside because of `error`. With `repeat` it is kept for `JobQueue.executed`, too."""

    def requeue(self) -> None:
        """Put the job back into the queue, at its old place."""


class JobQueue(ABC):
    """A queue of jobs. Every method raises `StorageError` if the file system or the store refuses.

    Programs call `submit`, `wait`, `finished`, `forget_result`, `waiting`, `failed` and `events`. The worker calls the other
    methods, from `take_turn` to the end of its turn.
    """

    worker_poll_s: float = 0.1
    """Seconds between two looks of the worker for a job."""
    result_poll_s: float = 0.005
    """Seconds between two looks of `wait` for a result."""

    @abstractmethod
    def submit(self, job: Job[Any]) -> str:
        """Queue `job` behind all that were submitted before. Returns its name. It is queued completely or not at all.

        Raises `ConfigError` for a job with a function.
        """

    @abstractmethod
    def waiting(self) -> list[str]:
        """The names of the waiting jobs, in order."""

    @abstractmethod
    def failed(self) -> list[FailedJob]:
        """The jobs that were set aside, in order, with their reasons."""

    @abstractmethod
    def finished(self, name: str) -> Finished | None:
        """The result of job `name`; None before it was executed. Raises the error with which it failed."""

    @abstractmethod
    def forget_result(self, name: str) -> None:
        """Delete the result of job `name`."""

    @abstractmethod
    def events(self) -> list[dict[str, Any]]:
        """The reports of all workers so far, in order: see `JobWorker`."""

    def wait(self, name: str, timeout_s: float) -> Any:
        """Return the result of job `name`, or raise its error, or `DeadlineExceededError`."""
        deadline = Deadline.after(timeout_s)
        while (found := self.finished(name)) is None:
            deadline.check(f"a worker to execute job {name}", part=_PART)
            time.sleep(self.result_poll_s)
        return found.result

    @abstractmethod
    def take_turn(self) -> Callable[[], None] | None:
        """Make this process the worker. Returns what ends its turn; None while another process is the worker."""

    @abstractmethod
    def check_turn(self) -> None:
        """Raise `StorageError` if this process is not the worker any more."""

    @abstractmethod
    def take(self) -> TakenJob | None:
        """Take the first waiting job; None if there is none. A damaged one is set aside."""

    @abstractmethod
    def recover(self) -> Sequence[TakenJob]:
        """Take the jobs that a worker before had taken when it ended, in order. The caller decides about each."""

    @abstractmethod
    def executed(self) -> Iterator[tuple[str, Job[Any]]]:
        """Names and jobs to be executed again, in the order of their execution. Raises `ProtocolError` for a damaged one."""

    @abstractmethod
    def forget_executed(self, names: Sequence[str]) -> None:
        """Delete jobs that were kept to be executed again."""

    @abstractmethod
    def note(self, name: str) -> dict[str, Any]:
        """Read the note `name` of the workers; empty if there is none."""

    @abstractmethod
    def write_note(self, name: str, facts: Mapping[str, Any]) -> None:
        """Replace the note `name` of the workers."""

    @abstractmethod
    def write_result(self, name: str, result: Any) -> None:
        """Keep the result of the taken job `name` for its submitter."""

    @abstractmethod
    def write_event(self, facts: Mapping[str, Any]) -> None:
        """Report `facts`, with the time."""


def reason_of(plain: Any, where: str) -> WeightlaneError:
    """The error that set a job aside, of its decoded reason file at `where`."""
    if not isinstance(plain, dict):
        return StorageError(f"the reason in {where} cannot be read.", part=_PART)
    return error_from_wire(plain)
