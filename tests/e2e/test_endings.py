"""However a run ends, it says why, ends in time and leaves no process, no shared memory and no temporary file behind."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from run_process import END_S, START_S, Ended, RunProcess
from tiny_run import Material

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

StartRun = Callable[[Sequence[str]], RunProcess]
FOREVER = {"steps": 100_000, "evaluate_tasks": 0, "blocking_syncs": 1}
TRAINS = "step 10/"


@pytest.fixture
def endless(material: Material, start_run: StartRun, tmp_path: Path) -> Callable[..., RunProcess]:
    """Starts a run that trains until something ends it."""

    def start(**sections: object) -> RunProcess:
        config = material.write_config(tmp_path / "config", tmp_path / "run", **{"loop": FOREVER, **sections})
        return start_run(["train", str(config), "--plain"])

    return start


def only_line(ended: Ended) -> str:
    """The one line on standard error."""
    (line,) = ended.err.splitlines()
    return line


def test_a_killed_trainer_rank_ends_the_run_and_is_named(endless: Callable[..., RunProcess], tmp_path: Path) -> None:
    run = endless(trainer={"ranks": 2, "cpus_per_rank": 0.5})
    run.wait_for(TRAINS)
    ranks = run.named("ray::RankActor")
    assert len(ranks) == 2
    victim = max(process.pid for process in ranks)
    run.kill_process(victim)
    ended = run.end()
    assert ended.code == 2
    assert f"(process {victim}) died" in only_line(ended)
    assert only_line(ended).startswith("error: trainer group (peer trainer-")
    assert f"logs of the run's processes: {tmp_path / 'run' / 'logs'}" in ended.out
    assert list((tmp_path / "run" / "logs").glob("worker-*"))


def test_a_killed_rollout_actor_of_two_ranks_ends_the_run_and_is_named(endless: Callable[..., RunProcess]) -> None:
    run = endless(rollout={"tensor_parallel": 2, "cpus_per_rank": 0.5})
    run.wait_for(TRAINS)
    victim = run.kill("ray::ReplicaActor")
    ended = run.end()
    assert ended.code == 2
    assert f"rollout-0 (process {victim}) died" in only_line(ended)


def test_a_killed_vllm_engine_ends_the_run_and_is_named(endless: Callable[..., RunProcess]) -> None:
    run = endless()
    run.wait_for(TRAINS)
    run.kill("VLLM::EngineCore")
    ended = run.end()
    assert ended.code == 2
    assert only_line(ended).startswith("error: rollout-0")
    assert "processes are gone" in only_line(ended)


def test_ctrl_c_in_a_terminal_ends_a_training_run_cleanly(endless: Callable[..., RunProcess]) -> None:
    run = endless()
    run.wait_for(TRAINS)
    run.interrupt(signal.SIGINT, whole_group=True)
    ended = run.end()
    assert (ended.code, only_line(ended)) == (130, "interrupted; everything this run started has ended")


def test_sigint_while_ray_starts_ends_the_run_cleanly(endless: Callable[..., RunProcess]) -> None:
    run = endless()
    run.wait_until(lambda: bool(run.named("gcs_server")), "a Ray process")
    run.interrupt(signal.SIGINT)
    ended = run.end()
    assert (ended.code, only_line(ended)) == (130, "interrupted; everything this run started has ended")


def test_sigterm_while_vllm_starts_ends_the_run_cleanly_and_its_directory_can_be_used_again(
    endless: Callable[..., RunProcess], start_run: StartRun, tmp_path: Path
) -> None:
    run = endless(reward={"function": "rewards_of_test:nan"})
    run.wait_until(lambda: bool(run.named("multiprocessing.resource_tracker")), "a child of the replica")
    run.interrupt(signal.SIGTERM)
    ended = run.end()
    assert (ended.code, only_line(ended)) == (143, "terminated; everything this run started has ended")

    # The same command again; its reward function is no good, which shows with the first completion.
    again = start_run(["train", str(tmp_path / "config" / "run.toml"), "--plain"])
    ended = again.end(START_S + END_S)
    assert ended.code == 2
    assert only_line(ended).startswith("error: reward: rewards_of_test:nan returned nan for prompt ")
    assert only_line(ended).endswith("A reward must be a finite number.")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for two of a version's three buckets."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_ends_the_run_with_the_path_and_what_to_do(
    endless: Callable[..., RunProcess], small_disk: Path
) -> None:
    run = endless(
        **{"checkpoint_engine": {"backend": "filesystem"}, "checkpoint_engine.options": {"path": str(small_disk)}}
    )
    ended = run.end(START_S + END_S)
    assert ended.code == 2
    line = only_line(ended)
    assert line.startswith("error: sync: version 0 was aborted")
    assert f"cannot write {small_disk}/" in line
    assert line.endswith(
        "No space left on device. Free some space there, or set another checkpoint_engine.options.path."
    )
    assert list(small_disk.iterdir()) == [], "what was written of the version is gone"
