"""However a run ends, it says why, ends in time and leaves no process, no shared memory and no temporary file behind."""

from __future__ import annotations

import contextlib
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


@pytest.mark.parametrize(
    ("number", "whole_group", "code", "said"),
    [
        (signal.SIGINT, True, 130, "interrupted; everything this run started has ended"),
        (signal.SIGTERM, False, 143, "terminated; everything this run started has ended"),
    ],
    ids=["ctrl-c", "sigterm"],
)
def test_a_signal_ends_a_training_run_cleanly(
    endless: Callable[..., RunProcess], number: signal.Signals, whole_group: bool, code: int, said: str
) -> None:
    run = endless()
    run.wait_for(TRAINS)
    run.interrupt(number, whole_group=whole_group)
    ended = run.end()
    assert (ended.code, only_line(ended)) == (code, said)


def test_ctrl_c_while_vllm_starts_ends_the_run_cleanly_and_the_directory_can_be_used_again(
    material: Material, endless: Callable[..., RunProcess], start_run: StartRun, tmp_path: Path
) -> None:
    run = endless(reward={"function": "rewards_of_test:nan"}, loop={**FOREVER, "evaluate_tasks": 2})
    run.wait_until(lambda: bool(run.named("VLLM::EngineCore") or run.named("multiprocessing.spawn")), "an engine core")
    run.interrupt(signal.SIGINT)
    ended = run.end()
    assert (ended.code, only_line(ended)) == (130, "interrupted; everything this run started has ended")

    # The same command again; its reward function is no good, which shows with the first completion.
    again = start_run(["train", str(tmp_path / "config" / "run.toml"), "--plain"])
    ended = again.end(START_S + END_S)
    assert ended.code == 2
    assert only_line(ended).startswith("error: reward: rewards_of_test:nan returned nan for prompt ")
    assert only_line(ended).endswith("A reward must be a finite number.")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte: the tiny model in float32 takes 0.4, beside a version that is kept 0.8."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_ends_the_run_with_the_path_and_what_to_do(
    endless: Callable[..., RunProcess], small_disk: Path
) -> None:
    filler = small_disk / "somebody-elses-file"
    run = endless(
        loop={**FOREVER, "max_failed_syncs": 1},
        checkpoint_engine={"backend": "filesystem", "options": {"path": str(small_disk)}},
    )
    run.wait_for(TRAINS)
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    ended = run.end(END_S)
    assert ended.code == 2
    assert f"cannot write {small_disk}/" in only_line(ended)
    assert "No space left on device. Free some space there, or set another checkpoint_engine.options.path." in ended.err
    assert "aborted: " in ended.out
    assert [path.name for path in small_disk.iterdir()] == [filler.name]
