"""Makes this folder's helper modules importable, and shares processes with training engines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from engine_ranks import Parity, Teams, make_models

_teams = Teams()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks after a module's last test."""
    if nextitem is None or nextitem.path != item.path:
        _teams.end()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints by name."""
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def teams(models: dict[str, Path]) -> Teams:
    """Teams of ranks. The ones that tests share end with a module."""
    _teams.models = models
    return _teams


@pytest.fixture(scope="session")
def parity(teams: Teams) -> Parity:
    """Compares training with FSDP2's on one rank."""
    return Parity(teams)
