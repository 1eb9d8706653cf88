"""Makes this folder's helper modules importable, here and in the vLLM processes that tests start (they inherit sys.path)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1] / "sync"))
sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from layout_models import LayoutProcess
    from running_worker import Setup


@pytest.fixture(scope="session")
def process(session_children: Any) -> Iterator[LayoutProcess]:
    """A process that builds models; importing vLLM takes longer than all that is built there."""
    from layout_models import LayoutProcess

    started = LayoutProcess(session_children)
    yield started
    started.close()


@pytest.fixture(scope="session", params=[1, 2], ids=["tp1-untied", "tp2-tied"])
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
