"""Makes this folder's helpers and those of the end-to-end tests importable."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parent))

from run_process import RunProcess


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
