"""A replica that is killed in the middle of a run is missed by nobody, and its successor begins with the current version."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from installed import install
from run_process import StartRun, events_of
from tiny_run import Material

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS = 50

PACED_REWARD = '''
import time
from pathlib import Path

SLOW = Path(__file__).with_name("slow")

def paced(completion, task):
    """Takes up to forty seconds while the test wants the run to last."""
    for _ in range(800):
        if not SLOW.exists():
            break
        time.sleep(0.05)
    return sum(character < "m" for character in completion) / max(1, len(completion))
'''

OBSERVER = '''
import json
from pathlib import Path
from weightlane.plugins import hookimpl

NOTES = Path(__file__).with_name("notes.jsonl")

class Observer:
    """What the replicas' own processes see: their commits, and the versions that generated their answers."""

    def note(self, **facts):
        with NOTES.open("a") as file:
            file.write(json.dumps(facts) + "\\n")

    @hookimpl
    def replica_committed(self, replica, version):
        self.note(replica=replica, committed=version)

    @hookimpl
    def generation_finished(self, facts):
        self.note(replica=facts["replica"], oldest=facts["version_min"], newest=facts["version_max"])
'''


@pytest.fixture
def observer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs an observer as a distribution of its own, for the processes that the test starts; the file it writes."""
    folder = tmp_path / "site"
    install(folder, "observer_of_test", OBSERVER, "observer = observer_of_test:Observer")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return folder / "notes.jsonl"


@pytest.mark.exhaustive
def test_a_killed_replica_is_replaced_by_one_that_has_the_current_version_before_its_first_request(
    material: Material, start_run: StartRun, observer: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = material.write_config(
        tmp_path / "config",
        run_dir,
        loop={"steps": STEPS},
        rollout={"engine": "transformers", "replicas": 2},
        reward={"function": "paced_reward_of_test:paced"},
    )
    (config.parent / "paced_reward_of_test.py").write_text(PACED_REWARD)
    slow = config.parent / "slow"
    run = start_run(["train", str(config), "--plain"], forked=False)  # by one run, Ray starts all of its workers itself

    run.wait_for("step 10/")
    slow.touch()
    actors = run.named("ray::ReplicaActor")
    assert len(actors) == 2
    victim = actors[0].pid
    run.kill_process(victim)
    run.wait_for("is lost:")
    run.wait_for(" replaces ")
    run.note_segments()
    slow.unlink()
    ended = run.end()
    assert (ended.code, ended.err) == (0, ""), ended.out + ended.err

    [lost] = events_of(run_dir, "replica_lost")
    [joined] = events_of(run_dir, "replica_joined")
    dead, newcomer = lost["replica"], joined["replica"]
    assert f"{dead} (process {victim}) died" in lost["error"]
    assert (lost["left"], lost["needed"], lost["successor"]) == (1, 1, newcomer)
    assert (newcomer, joined["instead_of"]) == (f"{dead}.1", dead)
    assert joined["version"] >= 9
    other = "rollout-1" if dead == "rollout-0" else "rollout-0"
    assert f"{newcomer} replaces {dead} " in ended.out

    notes = [json.loads(line) for line in observer.read_text().splitlines()]
    mine = [note for note in notes if note["replica"] == newcomer]
    assert mine[0] == {"replica": newcomer, "committed": joined["version"]}, "before its first request"
    answers = [note for note in mine if "oldest" in note]
    assert answers, "it was given requests"
    assert min(answer["oldest"] for answer in answers) >= joined["version"]
    assert max(note["newest"] for note in notes if note["replica"] == other and "newest" in note) == STEPS

    steps = events_of(run_dir, "training_step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert max(event["staleness_max"] for event in steps) <= 1
    commits = events_of(run_dir, "version_committed")
    versions = [event["version"] for event in commits]
    assert versions == sorted(versions)
    assert versions[-1] == STEPS
    # Every version since went to both.
    since = [event["replicas"] for event in commits if event["version"] > joined["version"]]
    assert all(replicas.keys() == {newcomer, other} for replicas in since)
    assert {part["outcome"] for part in since[-1].values()} == {"committed"}
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["replicas_lost"], summary["replicas_replaced"]) == (1, 1)
    assert summary["versions_committed"] == len(set(versions))
    assert "rollout replicas lost" in ended.out
    assert list((run_dir / "logs").glob("worker-*")), "the dead one's log is kept"
