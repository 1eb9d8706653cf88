"""Shares processes with training engines among tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import peft_oracle
import pytest
from engine_ranks import Ranks, Teams, make_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints by name."""
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def teams(models: dict[str, Path]) -> Iterator[Teams]:
    """Teams of ranks. The ones that tests share end with a module: threads of process groups poll for as long as they live."""
    with ExitStack() as ends:
        yield Teams(models, ends)


@pytest.fixture(scope="session")
def oracle(models: dict[str, Path]) -> Iterator[Ranks]:
    """PEFT over transformers in float64, in a process of its own."""
    with Ranks(models, 1, program=Path(peft_oracle.__file__)) as one:
        yield one
