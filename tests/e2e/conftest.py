"""Makes this folder's helper modules importable, and what its tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run_process import RunProcess
from tiny_run import Material, make_material


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """A tiny model, its tokenizer and its tasks."""
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[[Sequence[str]], RunProcess]]:
    """Starts ``weightlane <arguments>``; whatever is left of it is killed after the test."""
    started: list[RunProcess] = []

    def start(arguments: Sequence[str]) -> RunProcess:
        started.append(RunProcess(arguments, tmp_path / f"run-{len(started)}"))
        return started[-1]

    yield start
    for run in started:
        run.reap()
