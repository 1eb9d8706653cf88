"""Runs of trainer and rollout processes, members of a run, and participants in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from direct_hop import Hop, MakeHop
from hop_run import MakeRun, Participant, Run

from weightlane.sync import Rendezvous


@pytest.fixture
def make_run(tmp_path: Path, socket_dir: Path) -> Iterator[MakeRun]:
    options: dict[str, dict[str, Any]] = {
        "filesystem": {"path": str(tmp_path / "store")},
        "shm": {"socket_dir": str(socket_dir)},
        "faulty:gloo": {"kinds": ["flip"], "rate": 1.0},
        "faulty:shm": {"kinds": ["flip"], "rate": 1.0, "inner": {"socket_dir": str(socket_dir)}},
    }
    made: list[Run] = []

    def make(backend: str = "shm", *arguments: Any, **more: Any) -> Run:
        run = Run(backend, options.get(backend, {}))
        made.append(run)
        run.begin(*arguments, **more)
        return run

    yield make
    for run in made:
        run.end()


@pytest.fixture
def start() -> Iterator[Callable[..., Participant]]:
    """Start a participant in a process of its own, which ends with the test; `is_ready` waits until it is made."""
    with ExitStack() as started:

        def make(*arguments: Any, **more: Any) -> Participant:
            participant = Participant(*arguments, **more)
            started.callback(participant.kill)
            return participant

        yield make


@pytest.fixture
def rendezvous() -> Rendezvous:
    return Rendezvous.host()


@pytest.fixture
def member(rendezvous: Rendezvous) -> Iterator[Rendezvous]:
    joined = Rendezvous.join(rendezvous.address)
    yield joined
    joined.close()


@pytest.fixture
def hop(tmp_path: Path) -> Iterator[MakeHop]:
    with ExitStack() as stack:

        def make(engine: str, *arguments: Any, **more: Any) -> Hop:
            options = {"path": str(tmp_path / "store")} if engine == "filesystem" else {}
            return Hop(stack, engine, options, *arguments, **more)

        yield make
