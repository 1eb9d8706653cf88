"""Runs of trainer and rollout processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from direct_hop import Hop, MakeHop
from hop_run import MakeRun, Run

from weightlane.sync import Rendezvous


@pytest.fixture
def make_run(tmp_path: Path, socket_dir: Path) -> Iterator[MakeRun]:
    options: dict[str, dict[str, Any]] = {
        "filesystem": {"path": str(tmp_path / "store")},
        "shm": {"socket_dir": str(socket_dir)},
    }
    made: list[Run] = []

    def make(backend: str = "shm", **arguments: Any) -> Run:
        run = Run(backend, options.get(backend, {}))
        made.append(run)
        run.begin(**arguments)
        return run

    yield make
    for run in made:
        run.end()


@pytest.fixture
def rendezvous() -> Rendezvous:
    return Rendezvous.host()


@pytest.fixture
def hop(tmp_path: Path) -> Iterator[MakeHop]:
    with ExitStack() as stack:

        def make(engine: str, *arguments: Any, **more: Any) -> Hop:
            options = {"path": str(tmp_path / "store")} if engine == "filesystem" else {}
            return Hop(stack, engine, options, *arguments, **more)

        yield make
