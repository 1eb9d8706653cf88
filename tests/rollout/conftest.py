"""Makes this folder's helper modules importable, here and in the vLLM processes that tests start (they inherit sys.path)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import fork_server
import pytest
from json_program import Program

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1] / "sync"))
sys.path.insert(0, str(Path(__file__).parent))

# vLLM's processes are forked from one that has imported it.
fork_server.install()

if TYPE_CHECKING:
    from running_worker import Setup


@pytest.fixture(scope="package")
def process() -> Iterator[Program]:
    """`layout_process.py`, which builds models."""
    started = Program(Path(__file__).with_name("layout_process.py"), env={"VLLM_LOGGING_LEVEL": "ERROR"})
    yield started
    started.kill()


@pytest.fixture(scope="package", params=[1, 2], ids=["tp1-untied", "tp2-tied"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """A running worker that starts from model 0. The vocabulary needs padding rows.

    Shared by modules, because it takes long to start; the last test of the last module that uses it kills a rank.
    """
    from running_worker import running
    from tiny_models import make_qwen3

    from weightlane.rollout.shared_memory import segments_of_trees

    base = tmp_path_factory.mktemp("models")
    world = request.param
    models = [make_qwen3(base / f"model{seed}", seed=seed, tied=world == 2, vocab=300) for seed in range(3)]
    with running(models, models[0], tensor_parallel=world, dtype="float32") as made:
        segments = segments_of_trees([os.getpid()])
        made.new_trainer()
        made.connect()
        yield made
        made.trainer.close()
    # Also after the last test, which kills a rank.
    assert segments
    assert not [segment for segment in segments if segment.exists()]
