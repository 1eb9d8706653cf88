"""Makes this folder's helper modules importable, and what its tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run_process import RunProcess
from tiny_run import BETAS, LEARNING_RATE, Material, make_material


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """A tiny model, its tokenizer and its tasks."""
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="session")
def over_files(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunProcess]:
    """A run that trains four steps over the filesystem engine and ends by itself; its files are below ``folder``.

    It starts when a test first asks for it. A single run keeps one core busy, so the test before the one that judges it asks,
    too.
    """
    folder = tmp_path_factory.mktemp("over-files")
    config = material.write_config(
        folder / "config",
        folder / "run",
        # On-policy: no task is drawn before the version that generates it serves.
        loop={"steps": 4, "max_staleness": 0, "save_every": 2},
        trainer={"ranks": 2, "learning_rate": LEARNING_RATE, "betas": BETAS},
        reward={"function": "rewards_of_test:remembering"},
    )
    run = RunProcess(
        ["train", str(config), "--plain", "--set", "checkpoint_engine.backend=filesystem"], folder / "logs"
    )
    yield run
    run.reap()


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
