"""Makes this folder's helper modules importable, and shares the worker processes of a module, which take long to start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from engine_ranks import Parity, Ranks, make_models

_teams: dict[int, Ranks] = {}


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the workers after a module's last test: threads of their process groups poll for as long as they live."""
    if nextitem is None or nextitem.path != item.path:
        while _teams:
            _teams.popitem()[1].end()


@pytest.fixture(scope="session")
def ranks_of() -> Callable[[int], Ranks]:
    """Workers by their number, started once for a module."""

    def found(world: int) -> Ranks:
        if world not in _teams:
            _teams[world] = Ranks(world)
        return _teams[world]

    return found


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints by name."""
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def parity(ranks_of: Callable[[int], Ranks], models: dict[str, Path]) -> Parity:
    """Compares training with FSDP2's on one rank."""
    return Parity(ranks_of, models)
