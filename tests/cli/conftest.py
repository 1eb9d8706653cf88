"""Makes a tiny model and its tasks, and keeps commands from starting a run."""

from __future__ import annotations

import pytest
from tiny_run import Material, make_material


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """A tiny model, its tokenizer and its tasks."""
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test in which a command starts a process before it has found its user's mistake."""
    from weightlane.cli.commands import sft, tinker, train

    def started(*arguments: object) -> None:
        raise AssertionError("a process was started before everything had been checked")

    for command in (sft, tinker, train):
        monkeypatch.setattr(command, "RayCluster", started)
