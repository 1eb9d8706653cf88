"""Makes this folder's helper modules importable, here and in the vLLM processes that tests start (they inherit sys.path)."""

from __future__ import annotations

import asyncio
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
    from running_worker import RecordingWorker, Setup
    from tiny_models import make_qwen3

    from weightlane.rollout import RolloutConfig
    from weightlane.rollout.shared_memory import segments_of_trees

    base = tmp_path_factory.mktemp("models")
    world = request.param
    models = [make_qwen3(base / f"model{seed}", seed=seed, tied=world == 2, vocab=300) for seed in range(3)]
    config = RolloutConfig(
        tensor_parallel=world,
        dtype="float32",
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
        extra_engine_args={"worker_extension_cls": "probe_extension.ProbeExtension"},
    )
    environment = dict(os.environ)
    with asyncio.Runner() as runner:
        made = Setup(runner, RecordingWorker("rollout-0", config, models[0]), models, world)
        try:
            runner.run(made.worker.start())
            # Other tests of the session must not find what a replica's own process sets.
            os.environ.clear()
            os.environ.update(environment)
            segments = segments_of_trees([os.getpid()])
            made.new_trainer()
            made.connect()
            yield made
            made.trainer.close()
        finally:
            runner.run(made.worker.close())
    # Also after the last test, which kills a rank.
    assert segments
    assert not [segment for segment in segments if segment.exists()]
