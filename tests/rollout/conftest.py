"""Shares vLLM processes among the tests of replicas, and forks them from one that has imported vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import fork_server
import pytest
from json_program import Program

# vLLM's processes are forked from one that has imported it.
fork_server.install()

if TYPE_CHECKING:
    from running_replica import Setup


HERE = Path(__file__).parent
_shared = {folder: ExitStack() for folder in (HERE, HERE / "commit")}
"""Resources that the tests of a folder share, closed after the last of them.

pytest would keep session fixtures until the session ends, during the tests of other folders. The ranks of an idle engine still
look for work, which takes two CPU seconds a minute.
"""


@pytest.hookimpl(trylast=True)  # after the fixtures of the test itself
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    for folder, stack in _shared.items():
        if nextitem is None or not nextitem.path.is_relative_to(folder):
            stack.close()


@pytest.fixture(scope="session")
def process() -> Program:
    """`layout_process.py`, which builds models."""
    started = Program(HERE / "layout/layout_process.py", env={"VLLM_LOGGING_LEVEL": "ERROR"}, again=True)
    _shared[HERE].callback(started.kill)
    return started


@pytest.fixture
def setup(engine: Setup) -> Iterator[Setup]:
    """A running replica to which a trainer publishes dense versions through shared memory, unless the test changes that."""
    config, trainer = engine.replica.config, engine.trainer
    yield engine
    engine.replica._engine.config = config
    if engine.trainer is not trainer:
        engine.connect()


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """A running replica of two ranks that starts from model 0. The vocabulary needs padding rows.

    Shared by modules, because it takes long to start; the last test of the last module that uses it kills a rank.
    """
    from running_replica import running
    from tiny_models import make_qwen3

    from weightlane.rollout.contract.named_segments import segments_of_trees

    base = tmp_path_factory.mktemp("models")
    models = [make_qwen3(base / f"model{seed}", seed=seed, tied=True, vocab=300) for seed in range(3)]
    stack, others = ExitStack(), segments_of_trees([os.getpid()])
    setup = stack.enter_context(running(models, models[0], tensor_parallel=2, dtype="float32"))
    segments = segments_of_trees([os.getpid()]) - others

    def close() -> None:
        stack.close()
        assert segments
        assert not [segment for segment in segments if segment.exists()], "left behind, also after a rank was killed"

    _shared[HERE / "commit"].callback(close)
    setup.connect()
    return setup
