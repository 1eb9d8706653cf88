"""A whole run over episodes: the calculator example, from its preparation to a policy that uses the tool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from run_process import StartRun, events_of
from tiny_run import IN_ENGINE
from waiting import HANG_S

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.exhaustive]

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"


def test_the_calculator_example_learns_over_two_turns_and_trains_the_engines_own_tokens(
    tmp_path: Path, start_run: StartRun
) -> None:
    task, run_dir = tmp_path / "task", tmp_path / "run"
    prepare = [sys.executable, str(EXAMPLE / "prepare.py"), "--out", str(task)]
    subprocess.run(prepare, check=True, timeout=10 * HANG_S, stdout=subprocess.DEVNULL)
    settings = {
        "run.dir": run_dir,
        "model.path": task / "model",
        "data.train": task / "train.jsonl",
        "data.heldout": task / "heldout.jsonl",
        "loop.steps": 40,
        "loop.evaluate_tasks": 128,
        "loop.max_staleness": 0,
        "loop.blocking_syncs": 0,
        "rollout.extra_engine_args.distributed_executor_backend": IN_ENGINE,
    }
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    ended = start_run(["train", str(EXAMPLE / "calculator.toml"), "--plain", *arguments]).end()
    assert (ended.code, ended.err) == (0, ""), ended.out + ended.err
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.1
    steps = events_of(run_dir, "training_step")
    # The trainer computes the log-probabilities of the tokens that it was given: those of other tokens would differ.
    assert max(step["approx_kl"] for step in steps) < 1e-6
    assert all(1.5 < step["turns"] <= 4 for step in steps)
    assert all(0.2 < step["prefix_reuse"] < 1 for step in steps)
    assert all(step["environment/tool_calls"] > 0.5 for step in steps)
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert any("<|tool|>" in sample["completion"] and sample["turns"] == 2 for sample in samples if sample["reward"])
