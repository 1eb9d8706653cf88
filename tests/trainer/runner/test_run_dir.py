"""A run directory keeps two states, metrics and failures, and resumes from a whole state."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from weightlane.ckpt_engines import ConfigError, StorageError
from weightlane.trainer.runner.file_observers import FailuresFile, MetricsFile, draw_curves, read_metrics
from weightlane.trainer.runner.run_dir import RunDir, write_whole


def test_a_run_directory_keeps_the_two_newest_states_and_resumes_from_the_last(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run", resume=False)
    for step in (2, 4, 10):
        trainer = run_dir.begin_state(step)
        trainer.mkdir()
        (trainer / "shard").write_text(str(step))
        run_dir.finish_state(step, {"step": step})
    assert sorted(path.name for path in (tmp_path / "run" / "state").iterdir()) == ["latest.json", "step-10", "step-4"]
    for forgotten in (30, 40):  # of a run that went on from an older state, by hand
        run_dir.begin_state(forgotten).mkdir()
    run_dir.begin_state(10).mkdir()
    (run_dir.trainer_state(10) / "shard").write_text("10")
    run_dir.finish_state(10, {"step": 10})
    assert sorted(path.name for path in (tmp_path / "run" / "state").iterdir()) == ["latest.json", "step-10"]
    run_dir.begin_state(12).mkdir()
    again = RunDir(tmp_path / "run", resume=True)
    assert list(again.begin_state(12).parent.iterdir()) == [], "a half-written state is no state, and makes room"
    assert again.latest_step() == 10
    assert again.loop_state(10) == {"step": 10}
    assert (again.trainer_state(10) / "shard").read_text() == "10"


def test_a_run_directory_has_one_owner_whose_death_frees_it(children: Any, tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from weightlane.trainer.runner.run_dir import RunDir\n"
        "with RunDir(pathlib.Path(sys.argv[1]), resume=False).owned(): print('in', flush=True); sys.stdin.read()"
    )
    arguments = ["-c", program, str(tmp_path)]
    owner = children.start(arguments, forked=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout.readline() == "in\n"
    run_dir = RunDir(tmp_path, resume=False)
    for _ in range(2):  # being refused takes nothing from the owner
        with pytest.raises(ConfigError, match=rf"another run uses .*: process {owner.pid}\."), run_dir.owned():
            pass
    owner.kill()
    owner.wait()
    with run_dir.owned():
        assert (tmp_path / "state" / "run.lock").read_text() == f"{os.getpid()}\n"


def test_a_directory_that_cannot_be_one_is_refused_and_a_run_that_could_not_start_does_not_use_its_up(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    with RunDir(path, resume=False).owned():
        (path / "logs").mkdir()
    run_dir = RunDir(path, resume=False)
    (path / "metrics.jsonl").touch()
    (tmp_path / "file").touch()
    for folder, resume, said in (
        (path, False, r"holds files, but no saved state.*--set run\.dir="),
        (path, True, r"holds files, but no saved state.*--set run\.dir="),
        (tmp_path / "file", False, "Not a directory"),
        (tmp_path / "file" / "run", False, "Not a directory"),
    ):
        with pytest.raises(ConfigError, match=said):
            RunDir(folder, resume=resume)
    (path / "state" / "latest.json").write_text("{")
    with pytest.raises(ConfigError, match=r"latest\.json is damaged"):
        RunDir(path, resume=True)
    with pytest.raises(StorageError, match="cannot write"):
        run_dir.write_json("nowhere/summary.json", {})
    assert not list(tmp_path.rglob("*.partial"))


def test_two_that_write_a_file_at_the_same_time_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(_: int) -> None:
        monkeypatch.undo()
        write_whole(tmp_path / "request", "the other's")

    monkeypatch.setattr("os.fsync", meanwhile)
    write_whole(tmp_path / "request", "mine")
    assert (tmp_path / "request").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["request"]


def test_metrics_are_lines_of_json_that_survive_from_run_to_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).training_step(step=1, facts={"reward": 0.5})
    MetricsFile(path).version_aborted(version=2, facts={"error": "no\nroom"})
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["event"], first["step"], first["reward"]) == ("training_step", 1, 0.5)
    assert (second["event"], second["version"], second["error"]) == ("version_aborted", 2, "no\nroom")
    FailuresFile(path).item_failed(kind="reward", facts={"error": "no number", "count": 1})
    assert json.loads(path.read_text().splitlines()[2])["kind"] == "reward"
    with pytest.raises(StorageError, match="cannot write"):
        MetricsFile(tmp_path / "nowhere" / "metrics.jsonl").evaluated(step=0, facts={})


def test_metrics_of_what_does_not_end_take_no_more_than_twice_their_size(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", most_bytes=300)
    for version in range(20):
        file.version_committed(version=version, facts={"latency_s": 0.1})
    kept = [
        event["version"] for name in ("metrics.jsonl.1", "metrics.jsonl") for event in read_metrics(tmp_path / name)
    ]
    assert kept == list(range(kept[0], 20)), "the newest ones, none twice"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 400


def test_curves_show_what_was_trained_and_not_what_was_lost_before_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        file.run_started(facts={"step": start, "steps": 4})
        for step in steps:
            file.training_step(step=step, facts={"reward": 0.1 * start})
            file.version_committed(version=step, facts={"latency_s": 0.1})
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('"no event"\n{"event": "training_step", "st')  # it is being written
    counted = read_metrics(tmp_path / "metrics.jsonl")
    steps = [(event["step"], event["reward"]) for event in counted if event["event"] == "training_step"]
    assert steps == [(1, 0.0), (2, 0.0), (3, 0.2), (4, 0.2)]
    assert [event["version"] for event in counted if event["event"] == "version_committed"] == [1, 2, 3, 4]
    assert read_metrics(tmp_path / "none.jsonl") == []
    facts = {"reward": -7.0, "staleness_mean": 0.0, "staleness_max": 0, "fence_s": 0.0}
    MetricsFile(tmp_path / "low.jsonl").training_step(step=1, facts=facts)
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure.axes[0].get_ylim()))
    draw_curves(tmp_path / "low.jsonl", tmp_path / "curves.png")
    ((lowest, highest),) = drawn
    assert lowest < -7.0 < highest
