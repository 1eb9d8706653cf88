"""Experiment trackers, the real libraries offline: what they wrote is read from their files, not by their own readers."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

from weightlane.plugins.trackers import TRACKERS

LIBRARIES = Path(sys.prefix) / "trackers"
"""Where `.ci/setup-env` puts them."""
installed = pytest.mark.skipif(not LIBRARIES.is_dir(), reason="no tracker is installed: make setup installs them")
LOGS = """
import json, math, sys
from pathlib import Path
from weightlane.plugins import make_hooks
from weightlane.plugins.trackers import TRACKERS

name, directory, error = sys.argv[1:]
tracker = TRACKERS[name]("a project", "a run", {"loop": {"steps": 2}, "seed": 7}, Path(directory))
hooks = make_hooks([tracker])
for step in (1, 2):
    facts = {"seconds": 9.0, "reward": step / 4, "grad_norm": math.nan, "published_version": step, "note": "x"}
    hooks.training_step(step=step, facts=facts)
    hooks.version_committed(version=step - 1, facts={"latency_s": step / 8, "replicas": {"rollout-0": {"blocked_s": 0.5}}})
hooks.evaluated(step=2, facts={"accuracy": 0.75, "tasks": 8})
hooks.version_aborted(version=2, facts={"error": "a reason"})
hooks.run_ended(facts={"error": error} if error else {})
tracker.close()
tracker.close()
assert hooks.reports == (), hooks.reports
"""
CURVES = {
    "train/reward": {1: 0.25, 2: 0.5},
    "eval/accuracy": {2: 0.75},
    "sync/latency_s": {0: 0.125, 1: 0.25},
    "sync/rollout-0/blocked_s": {0: 0.5, 1: 0.5},
    "sync/aborted": {0: 0.0, 1: 0.0, 2: 1.0},
}


def logged(name: str, directory: Path, error: str = "") -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(LIBRARIES)]),
        "HOME": str(directory),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": (directory / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(directory / "trackio"),
        "DO_NOT_TRACK": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", LOGS, name, str(directory), error],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "stdout is the run's own"


def add(curves: dict[str, dict[int, float]], name: str, step: int, value: float) -> None:
    assert step not in curves.setdefault(name, {}), "logged once"
    curves[name][step] = value


@installed
@pytest.mark.parametrize(("error", "status"), [("", 3), ("the disk is full", 4)])
def test_mlflow_has_every_curve_setting_and_how_the_run_ended(tmp_path: Path, error: str, status: int) -> None:
    logged("mlflow", tmp_path, error)
    (run,) = (path.parent for path in (tmp_path / "mlruns").glob("*/*/meta.yaml"))
    curves: dict[str, dict[int, float]] = {}
    for file in (path for path in (run / "metrics").rglob("*") if path.is_file()):
        for line in file.read_text().splitlines():
            _, value, step, *_ = line.split()
            add(curves, str(file.relative_to(run / "metrics")), int(step), float(value))
    assert curves == CURVES
    assert (run / "params" / "loop.steps").read_text() == "2"
    assert (run / "tags" / "sync" / "abort reason").read_text() == "a reason"
    about = (run / "meta.yaml").read_text()
    assert f"status: {status}\n" in about
    assert "run_name: a run\n" in about
    assert "name: a project\n" in (run.parent / "meta.yaml").read_text()


@installed
def test_trackio_has_every_curve(tmp_path: Path) -> None:
    logged("trackio", tmp_path)
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    curves: dict[str, dict[int, float]] = {}
    for run, step, metrics in rows:
        assert run == "a run"
        for name, value in json.loads(metrics).items():
            if isinstance(value, float):
                add(curves, name, step, value)
    assert curves == CURVES


@installed
def test_wandb_has_every_curve_over_its_own_axis_and_no_network_was_needed(tmp_path: Path) -> None:
    logged("wandb", tmp_path)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    curves: dict[str, dict[int, float]] = {}
    text, record = file.read_bytes(), dict[str, str]()
    # Its format is protobuf: an item of a history record is a nested key (field 2) and its value as JSON (field 16).
    for key, value in re.findall(rb"\x12[\x01-\x7f]([\w/ -]+)\x82\x01[\x01-\x7f]([\d.e+-]+)", text):
        if key == b"_timestamp":  # the end of a record
            step = record.pop("train/step", record.pop("eval/step", record.pop("sync/version", "")))
            for name, number in record.items():
                if name in CURVES:
                    curves.setdefault(name, {})[int(step)] = float(number)
            record = {}
        record[key.decode()] = value.decode()
    assert curves == CURVES
    assert b"a reason" in text
    assert b"sync/version" in text, "an axis of its own"


def test_a_tracker_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tracker in TRACKERS.items():
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=name):
            tracker("a project", "a run")
