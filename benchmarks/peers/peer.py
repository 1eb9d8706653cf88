"""The interface that every row of the comparison implements: a `Peer` opens a `Session`, whose exchanges are timed."""

from __future__ import annotations

import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .workload import Workload

Group = Literal["limit", "weightlane", "peer"]
Through = Literal["memory", "network", "files"]


@dataclass(frozen=True, slots=True)
class Times:
    """One exchange, in seconds."""

    trainer_blocked_s: float
    """From the start until the sender may change its tensors."""
    rollout_blocked_s: float
    """How long the slowest receiver could not compute with its tensors."""
    latency_s: float
    """From the start until the last receiver holds the new values in its own tensors."""


@dataclass(frozen=True, slots=True)
class Task:
    """Settings of one measurement: the workload, the number of receivers, the deadline, and folders for files."""

    workload: Workload
    receivers: int
    deadline_s: float
    """For every single wait."""
    memory_dir: Path
    """An empty folder on tmpfs, gone when the measurement has ended."""
    disk_dir: Path
    """An empty folder on a disk, likewise."""


class Session(ABC):
    """A sender and its receivers, connected. One round is the three calls in their order; only `exchange` is timed."""

    @abstractmethod
    def change(self, round_number: int) -> None:
        """Change every element of the sender's tensors."""

    @abstractmethod
    def exchange(self, round_number: int) -> Times:
        """Bring the sender's tensors into every receiver's own."""

    @abstractmethod
    def verify(self, round_number: int) -> bool:
        """Whether every receiver's tensors now have the sender's digest. Also tidies up after the round."""


class Peer(ABC):
    """One row of the table.

    A peer is opened in a process of its own, started for it with `environment`, and by the interpreter named for it, if any.
    Everything it imports beyond torch it imports when it is opened.
    """

    name: str
    group: Group = "peer"
    through: Through
    """Medium that the weights pass through. Only rows with the same medium can replace one another."""
    what: str
    """Short description, for the table, of how the peer carries the weights."""
    packages: tuple[str, ...] = ()
    """Distributions whose versions belong to the row."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of all its processes."""
        return {}

    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """Why it cannot run here and what to do about it, or None. Called in the process that would open it."""

    @abstractmethod
    def open(self, task: Task) -> AbstractContextManager[Session]:
        """Start sender and receivers and connect them; leaving ends them."""

    def versions(self) -> dict[str, str]:
        """The installed version of each of `packages`."""
        found = {}
        for package in self.packages:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found


@dataclass(frozen=True, slots=True)
class Needs:
    """Modules a peer imports, and how to install them."""

    modules: tuple[str, ...]
    install: str

    def missing(self) -> str | None:
        """Return why the first of `modules` that fails to import does so, and how to install it; None if all import."""
        for module in self.modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - a broken installation fails in its own ways; the reason is reported
                return f"{module} cannot be imported ({type(error).__name__}: {error}); {self.install}"
        return None
