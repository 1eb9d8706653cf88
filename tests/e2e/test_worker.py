"""``weightlane worker`` on trainer ranks in Ray: one at a time, the next one goes on, and versions are stored."""

from __future__ import annotations

import re
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from run_process import StartRun
from safetensors.torch import load_file
from tiny_run import Material, toml_of
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import ProtocolError
from weightlane.cli.exit_codes import PROCESS_LOST
from weightlane.sync import read_version
from weightlane.trainer import TokenBatch, TokenSequence
from weightlane.trainer.runner.job_queue.job_queue import JobQueue
from weightlane.trainer.runner.jobs import Export, OptimStep, Publish, Save, SftStep

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.exhaustive
def test_the_next_worker_goes_on_where_one_was_that_was_killed_or_whose_rank_was(
    material: Material, start_run: StartRun, tmp_path: Path
) -> None:
    config, jobs = tmp_path / "worker.toml", tmp_path / "jobs"
    trainer = {"ranks": 2, "learning_rate": 1e-3, "cpus_per_rank": 0.5}
    config.write_text(
        toml_of(
            {
                "worker": {},
                "model": {"path": str(material.model)},
                "trainer": trainer,
                "ray": {"start_timeout_s": HANG_S},
                "checkpoint_engine": {"backend": "filesystem"},
                "checkpoint_engine.options": {"path": str(tmp_path / "versions")},
            }
        )
    )
    batch = TokenBatch(tuple(TokenSequence.of_completion([5, 6], [7, row]) for row in range(8, 12)))
    files = JobQueue(jobs)
    names = [files.submit(job) for job in (SftStep(batch), Save(tmp_path / "state"), SftStep(batch), OptimStep())]
    first = start_run(["worker", str(config), str(jobs)])
    assert [files.wait(name, HANG_S) for name in names[1:2]] == [None]
    assert files.wait(names[2], HANG_S).step == 2
    with pytest.raises(ProtocolError, match="no gradient"):
        files.wait(names[3], HANG_S)
    second = start_run(["worker", str(config), str(jobs)])
    wait_until(lambda: "another worker executes the jobs" in second.out, "the second one waits")
    more = [SftStep(batch), Export(tmp_path / "model", "float32"), *[SftStep(batch)] * 4]
    first.kill_process(first.named("RankActor")[1].pid)
    names += [files.submit(job) for job in more]
    ended = first.end()
    assert ended.code == PROCESS_LOST
    assert re.search(r"error: trainer ranks \(peer trainer-\d\): trainer rank \d \(process \d+\) died", ended.err)
    assert files.wait(names[4], HANG_S).step == 3
    second.interrupt(signal.SIGKILL)
    assert second.end().code == -signal.SIGKILL, "nothing of it is left"
    names += [files.submit(job) for job in (SftStep(batch), Export(tmp_path / "last", "float32"), Publish(1))]
    ended = start_run(["worker", str(config), str(jobs), "--until-empty"]).end()
    assert (ended.code, ended.err) == (0, "")
    assert files.wait(names[-3], HANG_S).step == 8
    published = read_version(str(tmp_path / "versions"))[1]
    exported = {
        name: each for file in (tmp_path / "last").glob("*.safetensors") for name, each in load_file(file).items()
    }
    assert exported
    assert {name: torch.equal(published[name], exported[name]) for name in exported} == dict.fromkeys(published, True)
    assert [each.name for each in files.failed()] == [names[3]], "the ranks' errors are not those of the jobs"
    assert (tmp_path / "model/config.json").is_file()
    counted = Counter((each["event"], each["job"]) for each in files.events())
    assert {name for event, name in counted if event == "executed"} == {*names} - {names[3]}
    assert counted["repeated", names[2]] == 2
    assert counted["repeated", names[0]] == 0, "it is in the saved state"
