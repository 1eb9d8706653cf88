"""`JobQueue`: whatever process is killed, jobs are executed once, in order, and only the worker with the turn reports results."""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import job_file_commands
import pytest
from waiting import HANG_S, MovableClock, wait_until

from weightlane.ckpt_engines import ConfigError, ProtocolError, StorageError
from weightlane.trainer.runner.job_queue.directory_store import DirectoryStore
from weightlane.trainer.runner.job_queue.job_queue import Finished, JobQueue
from weightlane.trainer.runner.job_queue.ledger import Ledger
from weightlane.trainer.runner.job_queue.object_store import ObjectStore
from weightlane.trainer.runner.jobs import Forward, Publish

LEASE_S = 600.0
"""So long that nothing is renewed while a test runs."""


@dataclass(frozen=True)
class Place:
    """A directory, or a place in a store."""

    place: str
    options: dict[str, str] | None

    def queue(self, **settings: Any) -> JobQueue:
        return JobQueue(self.place, self.options, **settings)

    @property
    def store(self) -> ObjectStore | DirectoryStore:
        return ObjectStore(self.place, self.options) if self.options else DirectoryStore(Path(self.place))


@pytest.fixture
def store_place(s3_url: str, s3_options: dict[str, str]) -> Place:
    return Place(s3_url, s3_options)


@pytest.fixture(params=["directory", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "directory":
        return Place(str(tmp_path / "jobs"), None)
    found: Place = request.getfixturevalue("store_place")
    return found


def test_a_store_whose_writes_heed_no_conditions_is_refused_in_words(s3_options: dict[str, str]) -> None:
    for url in ("memory://jobs", "gs://bucket/jobs", "s3://"):
        with pytest.raises(ConfigError, match="writes that fail if another one was faster"):
            JobQueue(url)
    fsspec.filesystem("s3", **s3_options).mkdir("unconditional")
    store = JobQueue("s3://unconditional/jobs", s3_options)
    store.submit(Publish(1))
    with pytest.raises(ConfigError, match=r"has no conditional writes.*Two workers could execute the same job"):
        store.take_turn()
    with pytest.raises(StorageError, match=r"cannot write condition-.*NoSuchBucket|bucket does not exist"):
        JobQueue("s3://missing/jobs", s3_options).take_turn()


def test_a_directory_that_cannot_be_used_is_an_error_at_once_and_its_lock_alone_is_the_turn(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be used"):
        JobQueue(tmp_path / "file")
    worker, other = JobQueue(tmp_path / "jobs"), JobQueue(tmp_path / "jobs")
    store = DirectoryStore(tmp_path / "jobs")
    assert store.lock()
    assert other.take_turn() is None, "nobody is named as the owner yet"
    store.unlock()
    give_back = worker.take_turn()
    assert give_back is not None
    worker.submit(Publish(1))
    (tmp_path / "jobs" / "worker.json").unlink()
    (tmp_path / "jobs" / "worker.json").mkdir()
    with pytest.raises(StorageError, match="cannot be used"):
        worker.take()
    give_back()


def test_jobs_are_taken_in_order_and_what_becomes_of_them_is_known(place: Place) -> None:
    jobs, submitter = place.queue(), place.queue()
    names = [submitter.submit(Publish(version)) for version in range(4)]
    assert submitter.waiting() == names == sorted(names)
    place.store.write(f"jobs/{names[0]}", b"nothing")
    end_turn = jobs.take_turn()
    assert end_turn is not None
    assert place.queue().take_turn() is None, "while this one has it"
    first = jobs.take()
    assert first is not None
    assert (first.name, first.job, submitter.waiting()) == (names[1], Publish(1), names[2:])
    jobs.requeue()
    assert submitter.waiting() == names[1:]
    for version in (1, 2, 3):
        taken = jobs.take()
        assert taken is not None
        assert taken.job == Publish(version)
        jobs.write_event({"event": "begun", "job": taken.name})
        jobs.write_result(taken.name, float(version))
        assert submitter.finished(taken.name) is None, "it is not known before the job is done"
        error = ConfigError("no.", part="test") if version == 2 else None
        jobs.end_job(taken.name, error, repeat=version > 1)
    assert jobs.take() is None
    assert submitter.finished(names[1]) == Finished(1.0)
    with pytest.raises(ConfigError, match="test: no"):
        submitter.wait(names[2], HANG_S)
    assert [(each.name, type(each.error)) for each in submitter.failed()] == [
        (names[0], ProtocolError),
        (names[2], ConfigError),
    ]
    assert [each["job"] for each in submitter.events()] == names[1:]
    assert [name for name, _ in jobs.executed()] == names[2:]
    jobs.write_note("saved", {"job": "x"})
    end_turn()
    with pytest.raises(StorageError, match="ended its turn"):
        jobs.take()
    later = place.queue()
    assert later.take_turn() is not None, "at once"
    assert later.note("saved") == {"job": "x"}
    later.forget_executed(names[2:])
    submitter.forget_result(names[1])
    assert submitter.finished(names[1]) is None
    assert submitter.submit(Publish(9)) > names[3], "numbers go on"
    assert len(place.store.names("jobs")) == 1
    assert place.store.names("failed") == sorted(f"{name}{end}" for name in names[:3:2] for end in ("", ".json"))
    place.store.write(f"failed/{names[0]}.json", b"{")
    assert isinstance(submitter.failed()[0].error, StorageError)


def test_the_turn_changes_hands_when_it_is_not_renewed_for_as_long_as_its_owner_said(
    s3_url: str, s3_options: dict[str, str]
) -> None:
    clocks = MovableClock(), MovableClock()
    store = ObjectStore(s3_url, s3_options)
    one, other = Ledger(store, LEASE_S, clocks[0]), Ledger(store, 1.0, clocks[1])
    assert one.take_turn()
    assert not other.take_turn()
    clocks[1].now_s += 0.99 * LEASE_S
    assert not other.take_turn()
    one.change(count=1)
    clocks[1].now_s += 0.5 * LEASE_S
    assert not other.take_turn(), "it has changed since"
    clocks[1].now_s += 0.99 * LEASE_S
    assert not other.take_turn()
    clocks[0].now_s += 0.69 * LEASE_S
    one.check()
    clocks[0].now_s += 0.02 * LEASE_S
    with pytest.raises(StorageError, match=r"lost the jobs.*could not be renewed for 420 s"):
        one.check()  # before another one may take it
    clocks[1].now_s += 0.02 * LEASE_S
    assert other.take_turn()
    assert other.facts["count"] == 1
    other.end_turn()
    one.end_turn()


def test_a_worker_that_was_stopped_reports_nothing_when_it_goes_on(store_place: Place) -> None:
    clock = MovableClock()
    stopped, next_one = store_place.queue(lease_s=LEASE_S), store_place.queue(lease_s=LEASE_S, clock=clock)
    name = stopped.submit(Publish(1))
    assert stopped.take_turn() is not None
    late = stopped.take()
    assert late is not None
    assert next_one.take_turn() is None
    clock.now_s += LEASE_S
    assert next_one.take_turn() is not None
    stopped.write_result(name, "late")
    with pytest.raises(StorageError, match="the turn has gone to"):
        stopped.end_job(name)
    with pytest.raises(StorageError, match="the turn has gone to"):
        stopped.check_turn()
    assert next_one.finished(name) is None
    assert [each.name for each in next_one.recover()] == [name]
    assert store_place.store.names("blobs") == [], "the late result is gone"
    next_one.requeue()
    taken = next_one.take()
    assert taken is not None
    next_one.write_result(name, "in time")
    next_one.end_job(name)
    assert next_one.finished(name) == Finished("in time")


@pytest.mark.parametrize("what", ["refused", "answer lost", "repeated", "late"])
def test_a_write_of_the_ledger_counts_once_whatever_becomes_of_its_answer(
    s3_url: str, s3_options: dict[str, str], what: str
) -> None:
    late: list[Callable[[], object]] = []

    class Lossy(ObjectStore):
        faults, permanent_errors = 0, what == "late"

        def swap(self, key: str, data: bytes, etag: str | None, timeout_s: float | None = None) -> str | None:
            found = ObjectStore.swap
            if not self.faults:
                while late:
                    late.pop()()
                return found(self, key, data, etag, timeout_s)
            self.faults -= 1
            if what == "late":  # the write of a change that failed takes effect when the next one begins
                late.append(lambda: found(self, key, data, etag))
            elif what != "refused":
                found(self, key, data, etag, timeout_s)
            if what == "repeated":
                return found(self, key, data, etag, timeout_s)
            raise StorageError("no answer.", part="test")

    store = Lossy(s3_url, s3_options)
    ledger = Ledger(store, LEASE_S)
    assert ledger.take_turn()
    for count in (1, 2):
        store.faults = 1
        with pytest.raises(StorageError) if what == "late" else nullcontext():
            ledger.change(count=count)
        assert what == "late" or ledger.read() == ledger.facts
    ledger.change(count=3)
    assert ledger.read()["count"] == 3
    ledger.end_turn()


@pytest.mark.parametrize("place", ["directory", pytest.param("store", marks=pytest.mark.exhaustive)], indirect=True)
def test_workers_that_are_killed_at_random_lose_no_job_and_do_none_twice(
    children: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place
) -> None:
    kills = 6 if place.options else 3
    monkeypatch.setenv(job_file_commands.PLACE, json.dumps([place.place, place.options]))
    jobs, chance = place.queue(poll_s=0.05), random.Random(kills)

    def start() -> subprocess.Popen[str]:
        child: subprocess.Popen[str] = children.start(
            [job_file_commands.__file__, "serve", str(tmp_path)], forked=True, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    def notes(worker: subprocess.Popen[str]) -> int:
        path = tmp_path / f"served-by-{worker.pid}.txt"
        return len(path.read_text().splitlines()) if path.exists() else 0

    workers, names = [start(), start()], list[str]()

    def progress() -> int:
        """The most that a living worker has noted. One that could not renew its turn in time has ended, and is replaced."""
        workers[:] = [start() if each.poll() is not None else each for each in workers]
        return max(map(notes, workers))

    for _ in range(kills):
        names += [jobs.submit(Publish(version)) for version in range(len(names), len(names) + 5)]
        least = chance.randrange(1, 8)
        wait_until(lambda least=least: progress() >= least, "a worker works", poll_s=0.002)
        killed = max(workers, key=notes)
        killed.kill()
        killed.wait(HANG_S)
    wait_until(lambda: progress() >= 0 and not place.store.names("jobs"), "all jobs were executed", poll_s=0.1)
    for version, name in enumerate(names):
        if version % 5:
            assert jobs.wait(name, HANG_S) == version
    (tmp_path / "end").touch()
    for worker in workers:
        worker.wait(HANG_S)
    served = [path.read_text().splitlines() for path in tmp_path.glob("served-by-*.txt")]
    done = Counter(line for each in served for line in each if line.startswith("done"))
    assert max(done.values()) == 1
    for each in served:
        begun = [line for line in each if line.startswith("begun")]
        assert all(before < after for before, after in pairwise(begun)), "in order"
    assert [each.name for each in jobs.failed()] == names[::5]
    assert len(place.store.names("blobs")) == len(names) - len(names[::5]), "one for each"


def test_what_a_killed_submitter_queued_is_whole_and_in_its_order(children: Any, tmp_path: Path) -> None:
    files = JobQueue(tmp_path)
    program = [job_file_commands.__file__, "submit", str(tmp_path)]
    submitters = [children.start(program, forked=True, stdout=subprocess.PIPE) for _ in range(2)]
    for submitter in submitters:
        assert submitter.stdout is not None
        assert all(submitter.stdout.readline() for _ in range(5)), "it submits and submits"
    for submitter in submitters:
        submitter.kill()
        submitter.wait(HANG_S)
    assert files.take_turn() is not None
    versions: dict[str, list[int]] = {}
    while (taken := files.take()) is not None:
        if isinstance(taken.job, Publish):
            versions.setdefault(str(taken.job.adapter), []).append(taken.job.version)
        else:
            assert isinstance(taken.job, Forward)
        files.end_job(taken.name)
    assert files.failed() == []
    for submitter in submitters:
        assert submitter.stdout is not None
        told = max([6, *map(int, submitter.stdout.read().split())])
        mine = versions[f"process-{submitter.pid}"]
        assert mine == list(range(len(mine))), "in order, none is missing"
        assert len(mine) >= told
