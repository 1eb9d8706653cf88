"""Peers whose sender and receivers are plain processes: each half is a class, run in a process of its own."""

from __future__ import annotations

import multiprocessing
import queue
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .peer import Peer, Session, Task, Times
from .workload import State, Workload

_PROCESSES = multiprocessing.get_context("forkserver")
"""Each half is forked from a process that has torch, and nothing else, loaded: importing it takes longer than most rounds."""
_JOIN_S = 10.0


class Link:
    """Channel between a peer's halves for everything but the weights: signals by semaphore, and queues of plain data.

    Every wait has a deadline.
    """

    def __init__(self, task: Task) -> None:
        self.receivers = task.receivers
        self.deadline_s = task.deadline_s
        self.memory_dir: Path = task.memory_dir
        self.disk_dir: Path = task.disk_dir
        self._ready = [_PROCESSES.Semaphore(0) for _ in range(task.receivers)]
        self._done = [_PROCESSES.Semaphore(0) for _ in range(task.receivers)]
        self._down: list[Any] = [_PROCESSES.Queue() for _ in range(task.receivers)]
        self._up: list[Any] = [_PROCESSES.Queue() for _ in range(task.receivers)]

    def signal_receivers(self) -> None:
        """Sender: the weights are there to be taken."""
        for semaphore in self._ready:
            semaphore.release()

    def await_sender(self, receiver: int) -> None:
        """Receiver: wait for `signal_receivers`."""
        self._acquire(self._ready[receiver], "the sender")

    def signal_sender(self, receiver: int) -> None:
        """Receiver: done with what the sender lent."""
        self._done[receiver].release()

    def await_receivers(self) -> None:
        """Sender: wait for the `signal_sender` of every receiver."""
        for number, semaphore in enumerate(self._done):
            self._acquire(semaphore, f"receiver {number}")

    def tell_receiver(self, receiver: int, what: object) -> None:
        """Sender: plain data for one receiver."""
        self._down[receiver].put(what)

    def tell_receivers(self, what: object) -> None:
        """Sender: plain data for all."""
        for receiver in range(self.receivers):
            self.tell_receiver(receiver, what)

    def hear_sender(self, receiver: int) -> Any:
        """Receiver: what the sender told it."""
        return self._get(self._down[receiver], "the sender")

    def tell_sender(self, receiver: int, what: object) -> None:
        """Receiver: plain data for the sender."""
        self._up[receiver].put(what)

    def hear_receiver(self, receiver: int) -> Any:
        """Sender: what that receiver told it."""
        return self._get(self._up[receiver], f"receiver {receiver}")

    def hear_receivers(self) -> list[Any]:
        """Sender: what each receiver told it."""
        return [self.hear_receiver(receiver) for receiver in range(self.receivers)]

    def _acquire(self, semaphore: Any, who: str) -> None:
        if not semaphore.acquire(timeout=self.deadline_s):
            raise TimeoutError(f"no signal from {who} within {self.deadline_s:.0f} s")

    def _get(self, source: Any, who: str) -> Any:
        try:
            return source.get(timeout=self.deadline_s)
        except queue.Empty:
            raise TimeoutError(f"no word from {who} within {self.deadline_s:.0f} s") from None


class Half:
    """The sender or a receiver, in its own process.

    Args:
        link: to the other halves.
        rank: 0 is the sender; receivers count from 1.
        workload: what is carried.
        options: the peer's.
    """

    flat = False
    """Whether its tensors are views of one buffer."""

    def __init__(self, link: Link, rank: int, workload: Workload, options: Mapping[str, Any]) -> None:
        self.link = link
        self.rank = rank
        self.workload = workload
        self.options = options
        self.state = State(workload, 1000 + rank, flat=self.flat)

    @property
    def receiver(self) -> int:
        """This receiver's number on the link, from 0."""
        return self.rank - 1

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """This half's own tensors."""
        return self.state.tensors

    def prepare(self) -> None:
        """Connect to the other halves. Once, not timed."""

    def before_round(self, round_number: int) -> None:
        """Not timed; the sender's tensors have their new values."""

    def after_round(self, round_number: int) -> None:
        """Not timed; everybody has the new values."""

    def close(self) -> None:
        """Release what `prepare` made."""


class Sender(Half, ABC):
    """The sending half."""

    @abstractmethod
    def send(self, round_number: int) -> None:
        """Send the tensors. Returning means that they may change again."""


class Receiver(Half, ABC):
    """A receiving half."""

    @abstractmethod
    def receive(self, round_number: int) -> float | None:
        """Bring the new values into the tensors.

        Returns:
            The ``time.monotonic()`` from which on the tensors were in use for it, when not from the beginning.
        """


class HalvesPeer(Peer):
    """A peer made of a `Sender` and a `Receiver` class."""

    sender: type[Sender]
    receiver: type[Receiver]
    receivers_at_most: int | None = None

    def __init__(self, name: str, what: str, **options: Any) -> None:
        self.name = name
        self.what = what
        self.options = options

    def unavailable_reason(self) -> str | None:
        """Return None, since plain processes need nothing but torch. Peers with other dependencies override this."""
        return None

    @contextmanager
    def open(self, task: Task) -> Iterator[Session]:
        """Start sender and receivers as processes and connect them; leaving ends them. See `Peer.open`."""
        if self.receivers_at_most is not None:
            receivers = min(task.receivers, self.receivers_at_most)
            task = Task(task.workload, receivers, task.deadline_s, task.memory_dir, task.disk_dir)
        session = _HalvesSession(self, task)
        try:
            session.prepare()
            yield session
        finally:
            session.close()


class _HalvesSession(Session):
    def __init__(self, peer: HalvesPeer, task: Task) -> None:
        _PROCESSES.set_forkserver_preload([__name__, type(peer).__module__])
        self._deadline_s = task.deadline_s
        self._link = Link(task)  # its semaphores last as long as it does
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(task.receivers + 1):
            mine, theirs = _PROCESSES.Pipe()
            kind = peer.receiver if rank else peer.sender
            process = _PROCESSES.Process(
                target=_serve,
                args=(theirs, kind, self._link, rank, task.workload, peer.options),
                name=f"{peer.name}/{rank}",
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def prepare(self) -> None:
        self._all("prepare")

    def change(self, round_number: int) -> None:
        self._ask(0, "change", round_number)
        self._digest = self._answer(0)
        self._all("before_round", round_number)

    def exchange(self, round_number: int) -> Times:
        answers = self._all("exchange", round_number)
        began, _, freed = answers[0]
        received = [(max(began, blocked_from), done) for _, blocked_from, done in answers[1:]]
        return Times(
            trainer_blocked_s=freed - began,
            rollout_blocked_s=max(done - blocked_from for blocked_from, done in received),
            latency_s=max(done for _, done in received) - began,
        )

    def verify(self, round_number: int) -> bool:
        digests = self._all("digest")[1:]
        self._all("after_round", round_number)
        return all(digest == self._digest for digest in digests)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_JOIN_S)
            if process.is_alive():
                process.kill()
                process.join(_JOIN_S)

    def _all(self, what: str, *arguments: int) -> list[Any]:
        for rank in reversed(range(len(self._pipes))):  # whoever receives is there before the sender begins
            self._ask(rank, what, *arguments)
        return [self._answer(rank) for rank in range(len(self._pipes))]

    def _ask(self, rank: int, what: str, *arguments: int) -> None:
        self._pipes[rank].send((what, arguments))

    def _answer(self, rank: int) -> Any:
        name = self._processes[rank].name
        if not self._pipes[rank].poll(self._deadline_s):
            raise TimeoutError(f"{name} does not answer within {self._deadline_s:.0f} s")
        try:
            error, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_JOIN_S)
            raise RuntimeError(f"{name} ended with exit code {self._processes[rank].exitcode}") from None
        if error:
            raise RuntimeError(f"{name}: {value}")
        return value


def _serve(
    pipe: Connection, kind: type[Half], link: Link, rank: int, workload: Workload, options: Mapping[str, Any]
) -> None:
    """Run one half until the pipe closes."""
    torch.set_num_threads(1)
    half: Half | None = None
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            break
        try:
            if half is None:
                half = kind(link, rank, workload, options)
            pipe.send((False, _do(half, what, *arguments)))
        except Exception:  # noqa: BLE001 - any error belongs in the table
            pipe.send((True, traceback.format_exc(limit=-4)))
    if half is not None:
        half.close()


def _do(half: Half, what: str, *arguments: int) -> Any:
    match what:
        case "change":
            half.state.change(*arguments)
            return half.state.digest()
        case "digest":
            return half.state.digest()
        case "exchange":
            began = time.monotonic()
            blocked_from = None
            if isinstance(half, Receiver):
                blocked_from = half.receive(*arguments)
            elif isinstance(half, Sender):
                half.send(*arguments)
            return began, began if blocked_from is None else blocked_from, time.monotonic()
        case _:
            return getattr(half, what)(*arguments)
