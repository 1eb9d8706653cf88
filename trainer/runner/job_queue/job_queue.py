"""`JobQueue`: jobs that any number of programs submit, and one worker at a time executes.

They are in an object store, for programs on any machines, or in a directory. Objects of the store, or files of the directory:

- ``jobs/NAME``: a job, never changed
- ``worker.json``: the `Ledger`: the worker that has the turn, the job that it executes, and the jobs to be executed again
- ``blobs/``, ``results/``: results, and which blob is the result of a job
- ``failed/``: jobs that were set aside, with the reason in a JSON document next to each
- ``events/``: reports, an object or several for each turn

Nothing is renamed. A job waits if it is in ``jobs/`` and the ledger does not know it. The worker first writes a result into
``blobs/``, then ends the job by one write of the ledger, and only then makes the result known. So a worker that has lost its turn
reports no result, and what a worker has left to do after its last write of the ledger is done by the next one.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import Deadline, StorageError, WeightlaneError, error_from_wire

from ..job_codec import decode_job, decode_result, encode_job, encode_result
from ..jobs import Job
from .directory_store import DirectoryStore
from .ledger import LEASE_S, Ledger
from .object_store import ObjectStore, decode_json, encode_json

_LOCKED_LEASE_S = 1e6
"""The same for a directory, where the lock of a worker that has ended is free at once."""
_NAME = re.compile(r"\d{12}-[0-9a-f]{12}\.job")
_EVENTS_BYTES = 32768
"""Size at which events get another object: it is written again with every event."""
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


@dataclass(frozen=True, slots=True)
class TakenJob:
    """A job that this process executes, until it calls `JobQueue.end_job` or `JobQueue.requeue`, or ends."""

    name: str
    job: Job[Any]


class JobQueue:
    """The jobs in a directory, or below an ``s3://`` URL. Every method raises `StorageError` if the place refuses.

    Programs call `submit`, `wait`, `finished`, `forget_result`, `waiting`, `failed` and `events`. The worker calls the other
    methods, from `take_turn` to the end of its turn.

    Args:
        place: A directory, which is made if there is none, or bucket and prefix, as ``s3://bucket/jobs``.
        storage_options: For a URL: arguments of s3fs's ``S3FileSystem``.
        lease_s: For a URL: seconds without a sign of life after which another worker takes over from this one.
        poll_s: Seconds between two looks for a job or a result. In an object store each is a request or two, so that it is a
            second unless it is given.
        clock: Returns the time in seconds. Only tests pass a clock of their own.

    Raises:
        ConfigError: It is another kind of URL, or s3fs is not installed.
    """

    def __init__(
        self,
        place: str | Path,
        storage_options: Mapping[str, Any] | None = None,
        *,
        lease_s: float = LEASE_S,
        poll_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store: ObjectStore | DirectoryStore
        if "://" in str(place):
            self._store = ObjectStore(str(place), storage_options)
            self.worker_poll_s = self.result_poll_s = 1.0 if poll_s is None else poll_s
        else:
            self._store, lease_s = DirectoryStore(Path(place)), _LOCKED_LEASE_S
            self.worker_poll_s, self.result_poll_s = (0.1, 0.005) if poll_s is None else (poll_s, poll_s)
        self._ledger = Ledger(self._store, lease_s, clock)
        self._blob = ""
        """The blob of the taken job's result; empty before it has one."""
        self._chunk, self._lines = 0, ""

    def submit(self, job: Job[Any]) -> str:
        """Queue `job` behind all that were submitted before. Returns its name. It is queued completely or not at all.

        Jobs that are submitted at the same time are in some order. Raises `ConfigError` for a job with a function.
        """
        data = encode_job(job)
        names = self._store.names("jobs")
        last = max((_number(name) for name in names), default=0)
        number = 1 + max(last, int(self._ledger.read().get("number", 0)))
        name = f"{number:012d}-{secrets.token_hex(6)}.job"
        self._store.write(f"jobs/{name}", data)
        return name

    def waiting(self) -> list[str]:
        """The names of the waiting jobs, in order."""
        return self._waiting(self._ledger.read())

    def failed(self) -> list[FailedJob]:
        """The jobs that were set aside, in order, with their reasons."""
        names = [name for name in self._store.names("failed") if _NAME.fullmatch(name)]
        return [FailedJob(name, reason) for name in names if (reason := self._reason(name)) is not None]

    def finished(self, name: str) -> Finished | None:
        """The result of job `name`; None before it was executed. Raises the error with which it failed."""
        if (reason := self._reason(name)) is not None:
            raise reason
        if not (blob := self._blob_of(name)) or (found := self._store.read(f"blobs/{blob}")) is None:
            return None
        return Finished(decode_result(found))

    def wait(self, name: str, timeout_s: float) -> Any:
        """Return the result of job `name`, or raise its error, or `DeadlineExceededError`."""
        deadline = Deadline.after(timeout_s)
        while (found := self.finished(name)) is None:
            deadline.check(f"a worker to execute job {name}", part=_PART)
            time.sleep(self.result_poll_s)
        return found.result

    def forget_result(self, name: str) -> None:
        """Delete the result of job `name`."""
        if blob := self._blob_of(name):
            self._store.delete(f"blobs/{blob}")
            self._store.delete(f"results/{name}")

    def events(self) -> list[dict[str, Any]]:
        """The reports of all workers so far, in order: see `JobWorker`."""
        found = [self._store.read(f"events/{name}") for name in self._store.names("events")]
        return [json.loads(line) for each in found if each for line in each.decode().splitlines()]

    def take_turn(self) -> Callable[[], None] | None:
        """Make this process the worker. Returns what ends its turn; None while another process is the worker.

        Raises `ConfigError` for a store without conditional writes.
        """
        if not self._ledger.take_turn():
            return None
        self._chunk, self._lines, self._blob = 0, "", ""
        self._settle()
        return self._ledger.end_turn

    def check_turn(self) -> None:
        """Raise `StorageError` if this process is not the worker any more."""
        self._ledger.check()

    def take(self) -> TakenJob | None:
        """Take the first waiting job; None if there is none. A damaged one is set aside."""
        self._ledger.check()
        for name in self._waiting(self._ledger.facts):
            self._ledger.change(taken=name, number=max(_number(name), int(self._ledger.facts.get("number", 0))))
            if taken := self._read(name):
                return taken
        return None

    def recover(self) -> list[TakenJob]:
        """Take the job that the worker before had taken when it ended, if any. The caller decides about it.

        Results that the worker had written and not made known are deleted.
        """
        name = self._ledger.facts.get("taken")
        if name is None:
            return []
        for blob in self._store.names("blobs"):
            if blob.startswith(name):
                self._store.delete(f"blobs/{blob}")
        return [] if (taken := self._read(name)) is None else [taken]

    def executed(self) -> Iterator[tuple[str, Job[Any]]]:
        """Names and jobs to be executed again, in the order of their execution. Raises `ProtocolError` for a damaged one."""
        for name in list(self._executed):
            yield name, decode_job(self._job(name))

    def forget_executed(self, names: Sequence[str]) -> None:
        """Delete jobs that were kept to be executed again."""
        # Jobs are deleted after they are forgotten. In between they would wait again, but for `forgotten`.
        left = [name for name in self._executed if name not in names]
        self._ledger.change(executed=left, forgotten=list(names))
        self._delete_forgotten()

    def note(self, name: str) -> dict[str, Any]:
        """Read the note `name` of the workers; empty if there is none."""
        found: dict[str, Any] = self._ledger.facts.get("notes", {}).get(name, {})
        return found

    def write_note(self, name: str, facts: Mapping[str, Any]) -> None:
        """Replace the note `name` of the workers."""
        self._ledger.change(notes={**self._ledger.facts.get("notes", {}), name: dict(facts)})

    def write_result(self, name: str, result: Any) -> None:
        """Keep the result of the taken job `name` for its submitter. It is known once the job is done."""
        blob = f"{name}.{self._ledger.owner}"
        self._store.write(f"blobs/{blob}", encode_result(result))
        self._blob = blob

    def write_event(self, facts: Mapping[str, Any]) -> None:
        """Report `facts`, with the time."""
        if len(self._lines) > _EVENTS_BYTES:
            self._chunk, self._lines = self._chunk + 1, ""
        self._lines += json.dumps({"time": round(time.time(), 3), **facts}) + "\n"
        key = f"events/{self._ledger.facts['turn']:08d}-{self._chunk:06d}.jsonl"
        self._store.write(key, self._lines.encode())

    def end_job(self, name: str, error: WeightlaneError | None = None, *, repeat: bool = False) -> None:
        """End the taken job after its execution, or set it aside because of `error`. With `repeat`, `executed` keeps it."""
        blob, self._blob = self._blob, ""
        reason = None if error is None else {"time": round(time.time(), 3), **error.to_wire()}
        executed = [*self._executed, name] if repeat else self._executed
        ended = {"name": name, "blob": "" if reason else blob, "reason": reason}
        self._ledger.change(taken=None, ended=ended, executed=executed)
        self._settle()

    def requeue(self) -> None:
        """Put the taken job back into the queue, at its old place."""
        self._blob = ""
        self._ledger.change(taken=None)

    @property
    def _executed(self) -> list[str]:
        found: list[str] = self._ledger.facts.get("executed", [])
        return found

    def _settle(self) -> None:
        """Make known how the last job has ended, and delete what is not needed. May be repeated, also by the next worker."""
        self._delete_forgotten()
        ended = self._ledger.facts.get("ended")
        if not ended:
            return
        name, reason = ended["name"], ended["reason"]
        if reason:
            self._store.write(f"failed/{name}.json", encode_json(reason))
            if (found := self._store.read(f"jobs/{name}")) is not None:
                self._store.write(f"failed/{name}", found)
        elif ended["blob"]:
            self._store.write(f"results/{name}", encode_json({"blob": ended["blob"]}))
        if name not in self._executed:
            self._store.delete(f"jobs/{name}")
        self._ledger.change(ended=None)

    def _delete_forgotten(self) -> None:
        if forgotten := self._ledger.facts.get("forgotten"):
            for name in forgotten:
                self._store.delete(f"jobs/{name}")
            self._ledger.change(forgotten=[])

    def _waiting(self, ledger: Mapping[str, Any]) -> list[str]:
        known = {*ledger.get("executed", ()), *ledger.get("forgotten", ()), ledger.get("taken")}
        known.add((ledger.get("ended") or {}).get("name"))
        return [name for name in self._store.names("jobs") if _NAME.fullmatch(name) and name not in known]

    def _read(self, name: str) -> TakenJob | None:
        """Read the taken job. If it is damaged, set it aside and return None."""
        try:
            return TakenJob(name, decode_job(self._job(name)))
        except StorageError:
            raise
        except WeightlaneError as error:
            self.end_job(name, error)
            return None

    def _job(self, name: str) -> bytes:
        if (found := self._store.read(f"jobs/{name}")) is None:
            raise StorageError(f"job {name} was deleted from {self._store.url}.", part=_PART)
        return found

    def _blob_of(self, name: str) -> str:
        found = self._store.read(f"results/{name}")
        return "" if found is None else str(decode_json(found, f"results/{name}").get("blob", ""))

    def _reason(self, name: str) -> WeightlaneError | None:
        if (found := self._store.read(f"failed/{name}.json")) is None:
            return None
        try:
            return error_from_wire(decode_json(found, f"the reason failed/{name}.json"))
        except StorageError as error:
            return error


def _number(name: str) -> int:
    return int(name[:12]) if _NAME.fullmatch(name) else 0
