"""TensorBoard's files hold every number of the run, read back by the format's own rules."""

from __future__ import annotations

import math
from pathlib import Path

from event_files import scalars_and_texts

from weightlane.plugins import make_hooks
from weightlane.plugins.tensorboard import TensorBoardObserver


def test_steps_versions_and_reasons_are_read_back(tmp_path: Path) -> None:
    directory = tmp_path / "board"
    hooks = make_hooks([TensorBoardObserver(directory)])
    assert not directory.exists(), "nothing is made before the first event"
    for step in (1, 2):
        facts = {"seconds": 9.0, "reward": step / 4, "grad_norm": math.nan, "published_version": step, "fence_s": 0.5}
        hooks.training_step(step=step, facts=facts)
    hooks.evaluated(step=2, facts={"accuracy": 0.75, "tasks": 8})
    replicas = {"rollout-0": {"outcome": "committed", "blocked_s": 0.25, "nbytes": 64}}
    hooks.version_committed(version=1, facts={"latency_s": 0.5, "sent_bytes": 64, "replicas": replicas})
    hooks.version_aborted(version=2, facts={"error": "a reason"})
    hooks.replica_quarantined(replica="rollout-0", facts={"version": 2, "error": "another"})
    hooks.run_ended(facts={})
    assert hooks.reports == ()
    curves, texts = scalars_and_texts(directory)
    assert curves == {
        "train/reward": {1: 0.25, 2: 0.5},
        "train/fence_s": {1: 0.5, 2: 0.5},
        "eval/accuracy": {2: 0.75},
        "sync/latency_s": {1: 0.5},
        "sync/sent_bytes": {1: 64.0},
        "sync/rollout-0/blocked_s": {1: 0.25},
        "sync/rollout-0/nbytes": {1: 64.0},
        "sync/aborted": {1: 0.0, 2: 1.0},
    }
    assert {tag.removesuffix("/text_summary"): text for tag, text in texts.items()} == {
        "sync/abort reason": "a reason",
        "sync/rollout-0/quarantined": "another",
    }
