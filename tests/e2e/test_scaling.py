"""Replicas are added to a run that trains, one is killed, one leaves: no sample is lost or trained twice, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from run_process import StartRun, events_of
from test_replica_loss import PACED_REWARD
from tiny_run import GROUP_SIZE, PROMPTS_PER_STEP, TRAIN_TASKS, Material

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow]

EPOCHS = 8
STEPS = EPOCHS * TRAIN_TASKS // PROMPTS_PER_STEP


@pytest.mark.exhaustive
def test_a_run_is_scaled_up_and_down_and_survives_a_death_between(
    material: Material, start_run: StartRun, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = material.write_config(
        tmp_path / "config",
        run_dir,
        loop={"steps": STEPS, "samples_per_step": PROMPTS_PER_STEP * GROUP_SIZE},
        rollout={"sizes": [2], "max_replicas": 3},  # those that are added have one rank
        reward={"function": "paced_reward_of_test:paced"},
    )
    (config.parent / "paced_reward_of_test.py").write_text(PACED_REWARD)
    slow = config.parent / "slow"
    run = start_run(["train", str(config), "--plain"])

    def scale(replicas: int) -> str:
        ended = start_run(["scale", str(run_dir), "--replicas", str(replicas)]).end()
        assert (ended.code, ended.err) == (0, ""), ended.out + ended.err
        return ended.out

    run.wait_for("step 3/")
    slow.touch()
    assert scale(3).splitlines()[-1] == "3 replicas serve: rollout-0, rollout-1, rollout-2"
    refused = start_run(["scale", str(run_dir), "--replicas", "4"]).end()
    assert refused.code == 2
    assert "rollout.max_replicas is 3" in refused.err
    victims = run.named("ray::ReplicaActor")
    assert len(victims) == 3
    run.note_segments()
    os.kill(victims[0].pid, signal.SIGKILL)
    run.wait_for(" replaces ")
    told = scale(1).splitlines()
    assert sum("has left" in line for line in told) == 2
    assert told[-1].startswith("1 replicas serve: rollout-")
    run.wait_until(lambda: len(run.named("ray::ReplicaActor")) == 1, "end of the others")
    run.note_segments()
    slow.unlink()
    ended = run.end()
    assert (ended.code, ended.err) == (0, ""), ended.out + ended.err

    trained = Counter(json.loads(line)["prompt"] for line in (run_dir / "samples.jsonl").read_text().splitlines())
    assert len(trained) == TRAIN_TASKS
    assert set(trained.values()) == {EPOCHS * GROUP_SIZE}, "every task in every epoch, and each sample once"
    steps = events_of(run_dir, "training_step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert max(event["staleness_max"] for event in steps) <= 1
    joined, left = events_of(run_dir, "replica_joined"), events_of(run_dir, "replica_left")
    assert [bool(event["instead_of"]) for event in joined] == [False, False, True]
    assert [event["error"] for event in left] == ["", ""]
    commits = events_of(run_dir, "version_committed")
    assert len(commits[-1]["replicas"]) == 1, "those that left do not count"
    summary = json.loads((run_dir / "summary.json").read_text())
    figures = [summary[f"replicas_{name}"] for name in ("lost", "replaced", "added", "left")]
    assert figures == [1, 1, 2, 2]
