"""Experiment trackers, the real libraries offline: what they wrote is read from their files, not by their own readers."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import HANG_S

LIBRARIES = Path(sys.prefix) / "trackers"
"""Where `.ci/setup-env` puts them."""
LOGS = """
import json, math, sys
from pathlib import Path
from weightlane.plugins import make_hooks
from weightlane.plugins.trackers import TRACKERS

trackers = [TRACKERS[name]("a project", "a run", {"loop": {"steps": 2}, "seed": 7}, Path(sys.argv[1])) for name in TRACKERS]
hooks = make_hooks(trackers)
for step in (1, 2):
    facts = {"seconds": 9.0, "reward": step / 4, "grad_norm": math.nan, "published_version": step, "note": "x"}
    hooks.training_step(step=step, facts=facts)
    hooks.version_committed(version=step - 1, facts={"latency_s": step / 8, "replicas": {"rollout-0": {"blocked_s": 0.5}}})
hooks.evaluated(step=2, facts={"accuracy": 0.75, "tasks": 8})
hooks.version_aborted(version=2, facts={"error": "a reason"})
hooks.run_ended(facts={"error": "the disk is full"})
for tracker in trackers:
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


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which all trackers have logged the same run."""
    if not LIBRARIES.is_dir():
        pytest.skip("no tracker is installed: make setup installs them")
    directory = tmp_path_factory.mktemp("trackers")
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
    command = [sys.executable, "-c", LOGS, str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "stdout is the run's own"
    return directory


def add(curves: dict[str, dict[int, float]], name: str, step: int, value: float) -> None:
    assert step not in curves.setdefault(name, {}), "logged once"
    curves[name][step] = value


def test_mlflow_has_every_curve_setting_and_how_the_run_ended(logged: Path) -> None:
    (run,) = (path.parent for path in (logged / "mlruns").glob("*/*/meta.yaml"))
    curves: dict[str, dict[int, float]] = {}
    for file in (path for path in (run / "metrics").rglob("*") if path.is_file()):
        for line in file.read_text().splitlines():
            _, value, step, *_ = line.split()
            add(curves, str(file.relative_to(run / "metrics")), int(step), float(value))
    assert curves == CURVES
    assert (run / "params" / "loop.steps").read_text() == "2"
    assert (run / "tags" / "sync" / "abort reason").read_text() == "a reason"
    about = (run / "meta.yaml").read_text()
    assert "status: 4\n" in about, "failed"
    assert "run_name: a run\n" in about
    assert "name: a project\n" in (run.parent / "meta.yaml").read_text()


def test_trackio_has_every_curve(logged: Path) -> None:
    (file,) = (logged / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    curves: dict[str, dict[int, float]] = {}
    for run, step, metrics in rows:
        assert run == "a run"
        for name, value in json.loads(metrics).items():
            if isinstance(value, float):
                add(curves, name, step, value)
    assert curves == CURVES


def test_wandb_has_every_curve_over_its_own_axis_and_no_network_was_needed(logged: Path) -> None:
    (file,) = (logged / "wandb").glob("offline-run-*/run-*.wandb")
    curves: dict[str, dict[int, float]] = {}
    records = list(records_of(file.read_bytes()))
    for record in records:
        if re.match(rb"\x08[\x80-\xff]*[\x00-\x7f]\x12", record, re.DOTALL):  # its number, then field 2: a history
            # An item's nested key is field 2, its value as JSON is field 16.
            items = dict(re.findall(rb"\x12[\x01-\x7f]([\w/ -]+)\x82\x01[\x01-\x7f]([\d.e+-]+)", record))
            (step,) = (items[axis] for axis in (b"train/step", b"eval/step", b"sync/version") if axis in items)
            for key in CURVES.keys() & {key.decode() for key in items}:
                add(curves, key, int(step), float(items[key.encode()]))
    assert curves == CURVES
    assert any(b"a reason" in record for record in records)


def records_of(data: bytes) -> Iterator[bytes]:
    """The protobuf messages in W&B's file: after a header, blocks of 32 KiB with records, whole or in parts, as LevelDB's."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
