"""Shares processes with training engines among tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import peft_oracle
import pytest
from engine_ranks import Ranks, Teams, make_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints by name."""
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def all_teams(models: dict[str, Path]) -> Iterator[Teams]:
    with closing(Teams(models)) as made:
        yield made


@pytest.fixture(scope="module")
def teams(request: pytest.FixtureRequest, all_teams: Teams) -> Iterator[Teams]:
    """Teams of ranks, which modules share. One that a failed test may have left anywhere is not used again."""
    failed = request.session.testsfailed
    yield all_teams
    if request.session.testsfailed > failed:
        all_teams.close()
    else:
        all_teams.rest()


@pytest.fixture(scope="session")
def oracle(models: dict[str, Path]) -> Iterator[Ranks]:
    """PEFT over transformers in float64, in a process of its own."""
    with Ranks(models, 1, program=Path(peft_oracle.__file__)) as one:
        yield one
