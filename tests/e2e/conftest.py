"""Starts whole runs, and shares a finished one among tests."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from installed import install
from run_process import FinishedRun, RunProcess, StartRun, starting
from scraping import scrape
from tiny_run import BETAS, GROUP_SIZE, LEARNING_RATE, PROMPTS_PER_STEP, Material, make_material

SAMPLES = PROMPTS_PER_STEP * GROUP_SIZE
"""Samples of a step, all of which the run records."""
IN_ORDER = {"micro_batch_tokens": 1, "max_grad_norm": 1e9}
RAISING_PLUGIN = """
from weightlane.plugins import hookimpl

@hookimpl
def rank_stepped(step):
    raise OSError(f"no room at [step {step}]")
"""


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """A tiny model, its tokenizer and its tasks."""
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="session")
def finished_run(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FinishedRun]:
    """A run of four steps on two trainer ranks with every observer, and with a plugin that raises."""
    folder = tmp_path_factory.mktemp("finished")
    config, run_dir = folder / "config", folder / "run"
    sections: dict[str, dict[str, Any]] = {
        # On-policy: no task is drawn before the version that generates it serves.
        "loop": {"steps": 4, "max_staleness": 0, "save_every": 2, "export_every": 1, "samples_per_step": SAMPLES},
        # A sequence in each pass and no clipping: `test_synchronous` repeats the sums in their order.
        "trainer": {"ranks": 2, "learning_rate": LEARNING_RATE, "betas": BETAS, **IN_ORDER},
        # One call at a time, so that a group's samples are noted in their order.
        "reward": {"function": "rewards_of_test:remembering", "workers": 1},
        "observers": {"trace": "trace.json", "tensorboard": "board", "prometheus_port": 0},
    }
    path = material.write_config(config, run_dir, **sections)
    with pytest.MonkeyPatch.context() as patch:
        install(folder / "site", "wl_raising_plugin", RAISING_PLUGIN, "raising = wl_raising_plugin")
        patch.setenv("PYTHONPATH", str(folder / "site"), prepend=os.pathsep)
        run = RunProcess(["train", str(path), "--plain"], folder / "logs")
    try:
        run.wait_for("step 2/4")
        served = re.search(r"metrics for Prometheus: (http://127\.0\.0\.1:\d+/metrics)", run.out)
        assert served, run.out
        samples = scrape(served[1])
        run.note_segments()
        ended = run.end()
        again = None
        try:  # at once: somebody else may get the port
            scrape(served[1])
        except OSError as refused:
            again = refused
        assert (ended.code, ended.err) == (0, ""), ended.out + ended.err
        # Whoever goes on with the run does so without observers, and need not wait for another vLLM.
        del sections["observers"]
        sections["rollout"] = {"engine": "transformers"}
        material.write_config(config, run_dir, **sections)
        yield FinishedRun(path, run_dir, ended.out, samples, again)
    finally:
        run.reap()


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[StartRun]:
    yield from starting(tmp_path)
