"""Makes this folder's helper modules importable, and shares the worker processes, which take long to start."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from engine_ranks import Parity, Ranks, make_models


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """Workers by their number, started once for all modules."""
    with ExitStack() as stack:
        yield functools.cache(lambda world: stack.enter_context(Ranks(world)))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints by name."""
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def parity(ranks_of: Callable[[int], Ranks], models: dict[str, Path]) -> Parity:
    """Compares training with FSDP2's on one rank."""
    return Parity(ranks_of(1), models)
