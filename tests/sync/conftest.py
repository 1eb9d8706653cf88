"""Runs of trainer and rollout processes, members of a run, and participants in processes of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from direct_hop import Hop, MakeHop
from hop_run import MakeRun, Participant, Run

from weightlane.sync import Rendezvous

_read_once = functools.cache(entry_points)


@pytest.fixture(autouse=True)
def _known_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the environment's entry points once for all tests: each look of a publisher or a subscriber takes 40 ms."""
    monkeypatch.setattr("weightlane.ckpt_engines.registry.entry_points", _read_once)
    monkeypatch.setattr("weightlane.plugins.loading.entry_points", _read_once)


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
