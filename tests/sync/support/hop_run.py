"""A run of `hop` processes around a coordinator in the test's own process."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hop
import pytest
import torch
from hop import Replica
from patience import PATIENT
from waiting import HANG_S, MovableClock, wait_until

from weightlane.ckpt_engines import (
    Deadline,
    SyncAbortedError,
    WorkerDiedError,
    error_from_wire,
)
from weightlane.plugins import RunHooks
from weightlane.sync import Coordinator, Rendezvous, ReplicaState, SyncConfig, SyncReport
from weightlane.sync.control.messages import Message

# A server that has everything imported forks the participants: each would need two seconds of CPU time for that.
_PROCESSES = multiprocessing.get_context("forkserver")
_ENGINES = ("shared_memory.shm", "torch_distributed.gloo", "filesystem.engine")
_PROCESSES.set_forkserver_preload(
    [
        "encodings.idna",
        "pytest",
        "known_entry_points",
        "hop",
        "weightlane.sync",
        *(f"weightlane.ckpt_engines.engines.{name}" for name in _ENGINES),
    ]
)


def start_server() -> None:
    """Start the server, unless it runs. Its module path is this process's: else every fork would import the helpers anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()


class Participant:
    """An object in a process of its own, which `hop.serve` makes there."""

    def __init__(self, make: Callable[..., Any], **arguments: Any) -> None:
        start_server()
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = _PROCESSES.Process(target=hop.serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def answer(self) -> Any:
        assert self._pipe.poll(HANG_S), f"participant {self.pid} does not answer"
        try:
            reply = self._pipe.recv()
        except EOFError:
            raise AssertionError(f"participant {self.pid} ended with {self._process.exitcode}") from None
        if "error" in reply:
            error = error_from_wire(reply["error"])
            error.args = (reply,)
            raise error
        return reply["value"]

    def is_ready(self) -> Participant:
        """Wait until it is made."""
        assert self.answer() == "ready"
        return self

    def call(self, method: str, *arguments: Any) -> Any:
        self.tell(method, *arguments)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(HANG_S)
        self._pipe.close()

    def _stopped(self) -> bool:
        with suppress(FileNotFoundError, ProcessLookupError):  # one has just ended
            threads = Path(f"/proc/{self.pid}/task").iterdir()
            return all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)
        return False

    @contextmanager
    def frozen(self) -> Iterator[None]:
        os.kill(self.pid, signal.SIGSTOP)
        try:
            wait_until(self._stopped, "stop of every thread")  # on a busy machine some run on for a while
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def tell(self, method: str, *arguments: Any) -> None:
        self._pipe.send([method, *arguments])


class Run:
    """A coordinator and its participants."""

    def __init__(self, backend: str, options: dict[str, Any]) -> None:
        self._started: list[Participant] = []
        self._plain = {"backend": backend, "options": options}
        self._trainer: dict[str, Any] = {}
        self._rollout: dict[str, Any] = {}
        self.rendezvous = Rendezvous.host()
        self.trainers: list[Participant] = []
        self.replicas: list[Replica] = []
        self.coordinator: Coordinator

    def _start(self, make: Callable[..., Any], **arguments: Any) -> Participant:
        started = Participant(make, **arguments, **self._plain, rendezvous=self.rendezvous.address.to_plain())
        self._started.append(started)
        return started

    def end(self) -> None:
        if hasattr(self, "coordinator"):
            self.coordinator.close()
        for participant in self._started:
            participant.kill()

    def begin(
        self,
        trainers: int = 1,
        replicas: int = 1,
        ranks: int = 1,
        *,
        trainer: dict[str, Any] | None = None,
        rollout: dict[str, Any] | None = None,
        sync: dict[str, Any] | None = None,
        hooks: RunHooks | None = None,
    ) -> None:
        """Start it. `sync` are settings of `SyncConfig`; deadlines that are not among them are too long to be missed."""
        self._trainer = trainer or {}
        for rank in range(trainers):
            name = f"trainer-{rank}"
            self.trainers.append(self._start(hop.Trainer, name=name, rank=rank, world=trainers, **self._trainer))
        self._rollout = rollout or {}
        for number in range(replicas):
            self.replicas.append(self._start_replica(number, ranks, **self._rollout))
        for participant in self.participants():
            participant.is_ready()
        publishers = [f"trainer-{rank}" for rank in range(trainers)]
        self._config = SyncConfig(**(PATIENT | (sync or {})))
        self.coordinator = Coordinator(self.rendezvous, publishers, self.replicas, self._config, hooks)

    def configure(self, **changes: float) -> None:
        """Change settings between two versions. Deadlines that are not named are too long to be missed."""
        self._config = self._config.model_copy(update=PATIENT | changes)
        self.coordinator._config = self.coordinator._session._config = self._config

    @contextmanager
    def deadlines_pass(self, when: Callable[[list[str]], bool] = lambda _: False) -> Iterator[MovableClock]:
        """The coordinator's clock stands still, but the deadline of each wait passes `when` the names waited for are such."""
        clock, queue = MovableClock(), self.coordinator._queue
        wait = queue._next

        def wait_or_pass(deadline: Deadline, names: Collection[str], what: str) -> Message:
            if when(sorted(names)):
                clock.advance(deadline.remaining_s)
            return wait(deadline, names, what)

        deadlines = SimpleNamespace(after=lambda seconds: Deadline.after(seconds, clock))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(queue, "_next", wait_or_pass)
            patch.setattr("weightlane.sync.control.coordinator.coordinator.Deadline", deadlines)
            yield clock

    def _start_replica(self, number: int, ranks: int, **rollout: Any) -> Replica:
        names = [f"rollout-{number}/{rank}" for rank in range(ranks)]
        return Replica(f"rollout-{number}", {name: self._start(hop.Rollout, name=name, **rollout) for name in names})

    def add_replica(self, **rollout: Any) -> Replica:
        replica = self._start_replica(len(self.replicas), 1, **rollout)
        self.replicas.append(replica)
        self.rank(-1).is_ready()
        wait_until(lambda: self._have_joined(replica), "news that it has joined")
        self.coordinator.add(replica)
        return replica

    def _have_joined(self, replica: Replica) -> bool:
        self.coordinator._queue.catch_up()
        return replica.ranks.keys() <= self.coordinator._roster.inboxes.keys()

    def restart_replica(self, number: int) -> None:
        """The only rank of a replica is killed, and another process started in its place."""
        (name,) = self.replicas[number].ranks
        self.replicas[number].ranks[name].kill()
        self.replicas[number].ranks[name] = self._start(hop.Rollout, name=name, **self._rollout)
        self.rank(number).is_ready()

    def lose_replica(self, number: int) -> None:
        """The first rank of a replica is killed, and the coordinator told so, as by whoever watches the processes."""
        self.rank(number).kill()
        died = WorkerDiedError("its process was killed.", part="watch")
        self.coordinator.participant_lost(died, self.replicas[number].name)

    def nobody_is_lost(self) -> None:
        """Wait until every replica that was given up has answered."""

        def all_answered() -> bool:
            self.coordinator._queue.catch_up()
            return ReplicaState.LOST not in self.coordinator.states().values()

        wait_until(all_answered, "answer of a replica that lives")

    def restart_trainer(self) -> None:
        self.trainers[0].kill()
        self.trainers[0] = self._start(hop.Trainer, name="trainer-0", rank=0, world=1, **self._trainer)
        self.trainers[0].is_ready()

    def participants(self) -> list[Participant]:
        return [*self.trainers, *(rank for replica in self.replicas for rank in replica.ranks.values())]

    def publish(self, version: int) -> None:
        for trainer in self.trainers:
            trainer.call("publish", version)

    def step(self, version: int) -> None:
        for trainer in self.trainers:
            trainer.call("step", version)

    def publish_next(self, version: int) -> None:
        """The weights of `version` are published under its number."""
        self.step(version)
        self.publish(version)

    def serve(self, version: int) -> None:
        """Publish `version` like `publish_next`, sync it, and check that every replica serves it, bit for bit."""
        self.publish_next(version)
        outcomes = self.outcomes(version)
        assert set(outcomes.values()) == {"committed"}
        ranks = [rank for replica in self.replicas if replica.name in outcomes for rank in replica.ranks.values()]
        assert all(rank.call("live_digest") == expected(version) for rank in ranks)

    def sync(self, version: int) -> SyncReport:
        return asyncio.run(self.coordinator.sync(version))

    def aborts(self, version: int, says: str | None = None) -> SyncAbortedError:
        """Sync `version`, which everybody gives up for a reason that `says` matches."""
        with pytest.raises(SyncAbortedError, match=says) as caught:
            self.sync(version)
        return caught.value

    def fails(self, version: int, says: str | None = None) -> SyncAbortedError:
        """Publish `version` like `publish_next`, sync it, and return the error with which everybody gives it up."""
        self.publish_next(version)
        return self.aborts(version, says)

    def nudge(self, version: int, every: int = 20) -> SyncReport:
        """Take a step that changes one element in `every`, publish it as `version`, and sync it."""
        for trainer in self.trainers:
            trainer.call("nudge", version, every)
        self.publish(version)
        return self.sync(version)

    def outcomes(self, version: int) -> dict[str, str]:
        """Sync `version` and tell what became of it on each replica."""
        return outcomes_of(self.sync(version))

    def rank(self, replica: int = 0) -> Participant:
        return next(iter(self.replicas[replica].ranks.values()))

    def live(self) -> list[dict[str, str]]:
        return [rank.call("live_digest") for replica in self.replicas for rank in replica.ranks.values()]


MakeRun = Callable[..., Run]
"""The fixture `make_run`: `make_run(backend, *arguments)` is a run that has begun; see `Run.begin`."""


def outcomes_of(report: SyncReport) -> dict[str, str]:
    return {name: part.outcome.value for name, part in report.replicas.items()}


def expected(version: int, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    return hop.digest(hop.weights(version, dtype))
