"""However a run ends, it gives the reason, ends in time and leaves no process, no shared memory and no temporary file.

`test_runs` ends one by Ctrl-C while it trains.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from run_process import Ended, RunProcess, StartRun
from tiny_run import Material

from weightlane.trainer.runner.run_dir import RunDir

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow]

FOREVER = {"steps": 100_000, "evaluate_tasks": 0, "blocking_syncs": 1}
QUICK = {"rollout": {"engine": "transformers"}}
"""A rollout that starts sooner than vLLM, where nothing depends on which it is."""
LEISURELY = {"function": "rewards_of_test:unhurried"}
TRAINS = "step 10/"
INTERRUPTED = "interrupted; everything this run started has ended"


@pytest.fixture
def endless(material: Material, start_run: StartRun, tmp_path: Path) -> Callable[..., RunProcess]:
    """Starts a run, called `name`, that trains at leisure until something ends it."""

    def start(name: str, **sections: object) -> RunProcess:
        config = material.write_config(
            tmp_path / "config" / name, tmp_path / name, **{"loop": FOREVER, "reward": LEISURELY, **QUICK, **sections}
        )
        return start_run(["train", str(config), "--plain"])

    return start


def only_line(ended: Ended) -> str:
    """The one line on standard error."""
    (line,) = ended.err.splitlines()
    return line


@pytest.mark.exhaustive
def test_a_killed_rank_ends_its_run_and_is_named_with_its_role(
    endless: Callable[..., RunProcess], tmp_path: Path
) -> None:
    """The rank is of the reference; `test_worker` kills one of the policy."""
    roles = {"algorithm": {"kl_coefficient": 0.1}, "reference": {"ranks": 2}, "observers": {"trace": "trace.json"}}
    trainer = {"ranks": 1, "cpus_per_rank": 0.5}
    run = endless("run", **roles, trainer=trainer, checkpoint_engine={"backend": "gloo"})
    run.wait_for(TRAINS)
    assert len(run.named("ray::RankActor")) == 3
    (part,) = (
        part for part in (tmp_path / "run" / "trace.json.parts").iterdir() if '"reference-1"' in part.read_text()
    )
    victim = int(part.stem.split("-")[-2])
    run.kill_process(victim)
    ended = run.end()
    assert ended.code == 3
    assert only_line(ended).startswith("error: reference ranks (peer reference-1): reference rank 1")
    assert f"(process {victim}) died" in only_line(ended)
    logs = tmp_path / "run" / "logs"
    assert f"logs of the run's processes: {logs}" in ended.out
    assert list(logs.glob("worker-*"))


@pytest.mark.exhaustive
def test_when_rays_own_process_dies_the_run_does_and_it_is_said_and_nothing_is_left(
    endless: Callable[..., RunProcess], tmp_path: Path
) -> None:
    run = endless("run")
    run.wait_for(TRAINS)
    run.note_segments()
    (raylet,) = (process for process in run.named("raylet/raylet") if process.name() == "raylet")
    run.kill_process(raylet.pid)
    ended = run.end()
    (line,) = run.err.splitlines()  # Ray may leave the run's process no time, and then another one speaks for it, later
    if ended.code == 3:
        assert re.search(r"error: .* died", line)
    else:
        assert "the process of the run was killed" in line
        assert str(tmp_path / "run" / "logs") in line
    assert list((tmp_path / "run" / "logs").glob("worker-*"))


@pytest.mark.exhaustive
def test_a_killed_vllm_engine_ends_its_run_and_is_named(endless: Callable[..., RunProcess]) -> None:
    run = endless("run", rollout={})
    run.wait_for(TRAINS)
    run.kill("VLLM::EngineCore")
    ended = run.end()
    assert ended.code == 3
    assert only_line(ended).startswith("error: rollout-0")
    assert "processes are gone" in only_line(ended)


@pytest.mark.exhaustive
def test_a_signal_ends_a_run_that_still_starts(endless: Callable[..., RunProcess], tmp_path: Path) -> None:
    run = endless("run")
    run.wait_until(lambda: bool(run.named("gcs_server")), "a Ray process")
    run.interrupt(signal.SIGINT)
    ended = run.end()
    assert (ended.code, only_line(ended)) == (130, INTERRUPTED)
    RunDir(tmp_path / "run", resume=False)  # can be used again


@pytest.mark.exhaustive
def test_a_ray_that_does_not_come_up_ends_the_run_with_the_logs_that_say_why(
    endless: Callable[..., RunProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_storage", "nowhere")  # Ray's first process ends as soon as it reads this
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "5")
    run = endless("run")
    ended = run.end()
    assert ended.code == 3
    assert only_line(ended).startswith("error: ray: Ray did not start on this machine: ")
    assert f"logs of the run's processes: {tmp_path / 'run' / 'logs'}" in ended.out
    assert any("nowhere" in log.read_text() for log in (tmp_path / "run" / "logs").glob("gcs_server.*"))
