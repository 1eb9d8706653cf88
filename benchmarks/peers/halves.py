"""Sender and receivers of every row of the comparison, each a class that runs in a process of its own."""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import queue
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from weightlane.cli.bench.workload.workload import Payload, Workload

_PROCESSES = multiprocessing.get_context("forkserver")
"""Each half is forked from a process that has torch, and nothing else, loaded: importing it takes longer than most rounds."""
_JOIN_S = 10.0


class Line:
    """Signals and plain data between a peer's halves: everything but the weights. Every wait has a deadline."""

    def __init__(self, receivers: int, deadline_s: float, memory_dir: Path, disk_dir: Path) -> None:
        self.receivers, self.deadline_s = receivers, deadline_s
        self.memory_dir, self.disk_dir = memory_dir, disk_dir
        """Empty folders on tmpfs and on a disk, gone when the turn has ended."""
        self._ready = [_PROCESSES.Semaphore(0) for _ in range(receivers)]
        self._down: list[Any] = [_PROCESSES.Queue() for _ in range(receivers)]
        self._up: list[Any] = [_PROCESSES.Queue() for _ in range(receivers)]

    def signal_receivers(self) -> None:
        """Sender: the weights are there to be taken."""
        for semaphore in self._ready:
            semaphore.release()

    def await_sender(self, receiver: int) -> None:
        """Receiver: wait for `signal_receivers`."""
        if not self._ready[receiver].acquire(timeout=self.deadline_s):
            raise TimeoutError(f"no signal from the sender within {self.deadline_s:.0f} s")

    def tell_receiver(self, receiver: int, what: object) -> None:
        """Sender: plain data for one receiver."""
        self._down[receiver].put(what)

    def tell_receivers(self, what: object) -> None:
        """Sender: plain data for all."""
        for receiver in range(self.receivers):
            self.tell_receiver(receiver, what)

    def from_sender(self, receiver: int) -> Any:
        """Receiver: what the sender told it."""
        return self._get(self._down[receiver], "the sender")

    def tell_sender(self, receiver: int, what: object) -> None:
        """Receiver: plain data for the sender."""
        self._up[receiver].put(what)

    def from_receiver(self, receiver: int) -> Any:
        """Sender: what that receiver told it."""
        return self._get(self._up[receiver], f"receiver {receiver}")

    def from_receivers(self) -> list[Any]:
        """Sender: what each receiver told it."""
        return [self.from_receiver(receiver) for receiver in range(self.receivers)]

    def _get(self, source: Any, who: str) -> Any:
        try:
            return source.get(timeout=self.deadline_s)
        except queue.Empty:
            raise TimeoutError(f"no word from {who} within {self.deadline_s:.0f} s") from None


class Half(ABC):
    """The sender (rank 0) or a receiver (from 1 on), in its own process; only `exchange` is timed."""

    def __init__(self, line: Line, rank: int, workload: Workload, options: Mapping[str, Any]) -> None:
        self.line, self.rank, self.workload, self.options = line, rank, workload, options
        self.receiver = rank - 1
        """A receiver's number on the line, from 0."""
        self.payload = filled(workload, rank)
        """The sender changes every element before a round; the receivers' tensors become equal by an exchange."""
        self.tensors = self.payload.tensors

    def prepare(self) -> None:  # noqa: B027 - optional
        """Connect to the other halves, once."""

    def before_round(self, round_number: int) -> None:  # noqa: B027 - optional
        """Called when the sender's tensors have their new values."""

    @abstractmethod
    def exchange(self, round_number: int) -> float | None:
        """Send the tensors, or bring the new values into them. Returning frees them.

        A receiver that pulls returns the ``time.monotonic()`` from which on the tensors were in use.
        """

    def after_round(self, round_number: int) -> None:  # noqa: B027 - optional
        """Called when everybody has the new values."""

    def close(self) -> None:  # noqa: B027 - optional
        """Release what `prepare` made."""


def filled(workload: Workload, rank: int) -> Payload:
    """The tensors of a half before the first round: random bits, others on every rank."""
    payload = Payload(workload.specs)
    payload.fill(1000 + rank)
    return payload


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes as uint8 [nbytes], sharing its memory."""
    return tensor.view(-1).view(torch.uint8)


def copy_all(into: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> None:
    """Copy each tensor of `source` into the one of that name."""
    for name, tensor in into.items():
        tensor.copy_(source[name])


@dataclass(frozen=True)
class Peer:
    """A row of the comparison; its processes get `environment`."""

    name: str
    through: Literal["memory", "network", "files"]
    """Medium of the weights: only rows with the same can replace one another."""
    what: str
    """Description of how it carries the weights, for the list."""
    sender: type[Half]
    receiver: type[Half]
    options: Mapping[str, Any] = field(default_factory=dict)
    group: Literal["limit", "weightlane", "peer"] = "peer"
    packages: tuple[str, ...] = ("torch",)
    """Distributions whose versions belong to the row."""
    modules: tuple[str, ...] = ()
    """Imports beyond torch, once it is prepared."""
    install: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    most_receivers: int = 1 << 10

    def missing(self) -> str | None:
        """Reason why it cannot run here and what to do about it, or None."""
        for module in self.modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - a broken installation fails in its own ways; the reason is reported
                return f"{module} cannot be imported ({type(error).__name__}: {error}); {self.install}"
        return None

    def versions(self) -> dict[str, str]:
        """The installed version of each of `packages`."""
        found = {}
        for package in self.packages:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found


class Session:
    """A peer's halves in their processes. A round is `change`, `exchange` and `verify`; `close` ends them."""

    def __init__(self, peer: Peer, workload: Workload, line: Line) -> None:
        _PROCESSES.set_forkserver_preload([__name__, peer.sender.__module__])
        self._line = line  # its semaphores last as long as it does
        self._pipes: list[Connection] = []
        self._processes = []
        self._digest = 0
        for rank in range(line.receivers + 1):
            mine, theirs = _PROCESSES.Pipe()
            kind = peer.receiver if rank else peer.sender
            arguments = (theirs, kind, line, rank, workload, peer.options)
            process = _PROCESSES.Process(target=_serve, args=arguments, name=f"{peer.name}/{rank}")
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def prepare(self) -> None:
        """Connect the halves."""
        self._all("prepare")

    def change(self, round_number: int) -> None:
        """Change every element of the sender's tensors."""
        (self._digest,) = self._all("change", round_number, ranks=[0])
        self._all("before_round", round_number)

    def exchange(self, round_number: int) -> dict[str, float]:
        """Bring the sender's tensors into every receiver's own. Returns seconds, by figure."""
        answers = self._all("exchange", round_number)
        began, _, freed = answers[0]
        received = [(max(began, in_use_from), done) for _, in_use_from, done in answers[1:]]
        return {
            "trainer_blocked_s": freed - began,
            "rollout_blocked_s": max(done - in_use_from for in_use_from, done in received),
            "latency_s": max(done for _, done in received) - began,
        }

    def verify(self, round_number: int) -> bool:
        """Whether every receiver's tensors now have the sender's digest. Also tidies up after the round."""
        digests = self._all("digest")[1:]
        self._all("after_round", round_number)
        return all(digest == self._digest for digest in digests)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_JOIN_S)
            if process.is_alive():
                process.kill()
                process.join(_JOIN_S)

    def _all(self, what: str, *arguments: int, ranks: Iterable[int] = ()) -> list[Any]:
        asked = list(ranks) or list(range(len(self._pipes)))
        for rank in reversed(asked):  # whoever receives is there before the sender begins
            self._pipes[rank].send((what, arguments))
        return [self._answer(rank) for rank in asked]

    def _answer(self, rank: int) -> Any:
        name = self._processes[rank].name
        if not self._pipes[rank].poll(self._line.deadline_s):
            raise TimeoutError(f"{name} does not answer within {self._line.deadline_s:.0f} s")
        try:
            error, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_JOIN_S)
            raise RuntimeError(f"{name} ended with exit code {self._processes[rank].exitcode}") from None
        if error:
            raise RuntimeError(f"{name}: {value}")
        return value


def _serve(
    pipe: Connection, kind: type[Half], line: Line, rank: int, workload: Workload, options: Mapping[str, Any]
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
            half = half or kind(line, rank, workload, options)
            pipe.send((False, _do(half, what, *arguments)))
        except Exception:  # noqa: BLE001 - any error belongs in the table
            pipe.send((True, traceback.format_exc(limit=-4)))
    if half is not None:
        half.close()


def _do(half: Half, what: str, *arguments: int) -> Any:
    if what == "change":
        half.payload.change(1.0, *arguments)
    if what in {"change", "digest"}:
        return half.payload.crc()
    began = time.monotonic()
    answer = getattr(half, what)(*arguments)
    return (began, began if answer is None else answer, time.monotonic()) if what == "exchange" else answer
