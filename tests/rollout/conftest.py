"""Shares vLLM processes among the tests of replicas, and forks them from one that has imported vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import fork_server
import pytest
from json_program import Program

# vLLM's processes are forked from one that has imported it.
fork_server.install()

if TYPE_CHECKING:
    from running_worker import Setup


HERE = Path(__file__).parent
_until_the_folder_ends = ExitStack()
"""Resources that this folder's tests share, closed after the last of them.

pytest would keep session fixtures until the session ends, beside the tests of other folders.
"""


@pytest.hookimpl(trylast=True)  # after the fixtures of the test itself
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or not nextitem.path.is_relative_to(HERE):
        _until_the_folder_ends.close()


@pytest.fixture(scope="session")
def process() -> Program:
    """`layout_process.py`, which builds models."""
    started = Program(HERE / "layout/layout_process.py", env={"VLLM_LOGGING_LEVEL": "ERROR"}, again=True)
    _until_the_folder_ends.callback(started.kill)
    return started


@pytest.fixture
def setup(engine: Setup) -> Iterator[Setup]:
    """A running worker to which a trainer publishes dense versions through shared memory, unless the test changes that."""
    config, trainer = engine.worker.config, engine.trainer
    yield engine
    engine.worker.config = config
    if engine.trainer is not trainer:
        engine.connect()


@pytest.fixture(
    scope="session",
    params=[pytest.param(2, id="tp2-tied"), pytest.param(1, id="tp1-untied", marks=pytest.mark.exhaustive)],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """A running worker that starts from model 0. The vocabulary needs padding rows.

    Shared by modules, because it takes long to start; the last test of the last module that uses it kills a rank.
    """
    with ExitStack() as stack:
        _until_the_folder_ends.callback(stack.close)
        yield stack.enter_context(_worker(request.param, tmp_path_factory.mktemp("models")))


@contextmanager
def _worker(world: int, base: Path) -> Iterator[Setup]:
    from running_worker import running
    from tiny_models import make_qwen3

    from weightlane.rollout.vllm.shared_memory import segments_of_trees

    models = [make_qwen3(base / f"model{seed}", seed=seed, tied=world == 2, vocab=300) for seed in range(3)]
    with running(models, models[0], tensor_parallel=world, dtype="float32") as made:
        segments = segments_of_trees([os.getpid()])
        made.connect()
        yield made
    # Also after the last test, which kills a rank.
    assert segments
    assert not [segment for segment in segments if segment.exists()]
