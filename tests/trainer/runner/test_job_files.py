"""`JobFiles`: whatever process is killed, every job is whole, in order, taken at most once, and found again."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import job_file_commands
import pytest
import torch
from engine_batches import batch_of, make_batch, make_samples
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import ConfigError, ProtocolError, StorageError, WorkerDiedError
from weightlane.trainer import AdamParams, LoraConfig, LossDenominators, MiniBatch, TokenBatch, sft
from weightlane.trainer.runner.job_codec import decode_job, encode_job
from weightlane.trainer.runner.job_files import JobFiles
from weightlane.trainer.runner.jobs import (
    JOBS,
    CreateAdapter,
    DropGradient,
    Export,
    Forward,
    ForwardBackward,
    Job,
    JointJob,
    Load,
    OptimStep,
    Publish,
    RemoveAdapter,
    RlStep,
    Save,
    SaveAdapter,
    SftStep,
)

PAIRS = TokenBatch(make_batch(1).sequences[:4], sequences_per_unit=2)
EXAMPLES: list[Job[Any]] = [
    CreateAdapter("a", LoraConfig(rank=3, targets=("q_proj",)), Path("/from"), optimizer=False),
    RemoveAdapter("a"),
    SaveAdapter("a", Path("/to")),
    Forward(PAIRS, ("logprobs", "entropy"), 4, "a"),
    ForwardBackward(
        make_batch(2),
        "likelihood",
        LossDenominators(9.0, 2.5),
        ("logprobs",),
        "a",
    ),
    ForwardBackward(batch_of(make_samples(2), experts=4), "objective"),
    DropGradient("a"),
    OptimStep("a", AdamParams(1e-4, (0.8, 0.95), 1e-12, 0.1, float("inf"))),
    RlStep(make_batch(0), [MiniBatch(len(make_batch(0)), LossDenominators(3.0, 1.0))]),
    SftStep(make_batch(0)),
    Save(Path("/state")),
    Load(Path("/state")),
    Export(Path("/model"), "bfloat16"),
    Publish(7, None),
]
WHOLE = encode_job(EXAMPLES[3])


def assert_same(found: Job[Any], wanted: Job[Any]) -> None:
    assert type(found) is type(wanted)
    for name in type(wanted).__dataclass_fields__:  # type: ignore[attr-defined]
        one, other = getattr(found, name), getattr(wanted, name)
        if not isinstance(other, TokenBatch):
            assert one == other, name
            continue
        assert one.sequences_per_unit == other.sequences_per_unit
        for mine, its in zip(one.sequences, other.sequences, strict=True):
            assert torch.equal(mine.tokens, its.tokens)
            assert torch.equal(mine.targets, its.targets)
            assert mine.per_token.keys() == its.per_token.keys()
            assert all(torch.equal(mine.per_token[each], its.per_token[each]) for each in its.per_token)
            assert mine.per_sequence == pytest.approx(its.per_sequence)


def test_every_kind_of_job_comes_back_as_it_was(tmp_path: Path) -> None:
    assert {type(job) for job in EXAMPLES} == set(JOBS)
    files = JobFiles(tmp_path / "jobs")
    names = [files.submit(job) for job in EXAMPLES]
    assert files.waiting() == names == sorted(names)
    for name, job in zip(names, EXAMPLES, strict=True):
        taken = files.take()
        assert taken is not None
        assert taken.name == name
        assert_same(taken.job, job)
        taken.done()
    assert files.take() is None
    assert [path for path in (tmp_path / "jobs").rglob("*") if path.is_file()] == [tmp_path / "jobs" / "numbering"]


def test_a_job_that_files_cannot_hold_and_a_directory_that_is_a_file_are_refused(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    for job, said in (
        (ForwardBackward(make_batch(0), sft), "is a function"),
        (JointJob((OptimStep("a"), OptimStep("b"))), "Write its parts as jobs"),
    ):
        with pytest.raises(ConfigError, match=said):
            files.submit(job)
    assert files.waiting() == []
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be used"):
        JobFiles(tmp_path / "file")


@given(st.data())
def test_no_bytes_are_taken_for_a_job_that_nobody_wrote(data: st.DataObject) -> None:
    changed = bytearray(WHOLE)
    if data.draw(st.booleans()):
        changed = bytearray(data.draw(st.binary(max_size=300)))
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        del changed[data.draw(st.integers(0, len(changed))) :]
    with suppress(ProtocolError):  # and nothing else; a changed number may be another job
        assert type(decode_job(bytes(changed))) in JOBS


def test_a_damaged_job_is_set_aside_with_its_reason_and_the_others_are_taken(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    names = [files.submit(Publish(version)) for version in range(4)]
    (tmp_path / "queued" / names[0]).write_bytes(b"nothing")
    (tmp_path / "queued" / names[2]).write_bytes(b"")
    found = []
    while (taken := files.take()) is not None:
        found.append(taken.name)
        taken.fail(WorkerDiedError("it died.", part="rank")) if taken.name == names[3] else taken.done()
    assert found == [names[1], names[3]]
    errors = {each.name: each.error for each in files.failed()}
    assert {name: type(error) for name, error in errors.items()} == {
        names[0]: ProtocolError,
        names[2]: ProtocolError,
        names[3]: WorkerDiedError,
    }
    assert str(errors[names[3]]) == "rank: it died."
    (tmp_path / "failed" / f"{names[0]}.json").write_text("{")
    assert isinstance(files.failed()[0].error, StorageError)
    assert files.submit(Publish(9)) > names[3], "numbers go on"


def test_a_job_that_is_queued_again_keeps_its_place_and_one_that_a_living_process_has_is_not_recovered(
    tmp_path: Path,
) -> None:
    files, other = JobFiles(tmp_path), JobFiles(tmp_path)
    names = [files.submit(Publish(version)) for version in range(3)]
    first, second = files.take(), other.take()
    assert first is not None
    assert second is not None
    assert files.recover() == other.recover() == []
    first.requeue()
    assert files.waiting() == [names[0], names[2]]
    again = other.take()
    assert again is not None
    assert (again.name, again.job) == (names[0], Publish(0))
    assert files.waiting() == [names[2]]


Process = subprocess.Popen[str]


@pytest.fixture
def start(children: Any) -> Callable[[str, Path], Process]:
    """Starts a submitter or a taker of a directory, which has said something then."""

    def start(how: str, directory: Path) -> Process:
        program = [job_file_commands.__file__, how, str(directory)]
        child: Process = children.start(program, forked=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline(), "it did not start"
        return child

    return start


def let_begin(*takers: Process) -> None:
    for taker in takers:
        assert taker.stdin is not None
        taker.stdin.write("\n")
        taker.stdin.flush()


def kill(*processes: Process) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(HANG_S)


def taken_in(directory: Path) -> list[list[str]]:
    """The names that each taker noted, in its order."""
    return [path.read_text().split() for path in directory.glob("taken-by-*.txt")]


def test_takers_take_each_job_once_in_order_and_the_jobs_of_killed_ones_are_found(
    start: Callable[[str, Path], Process], tmp_path: Path
) -> None:
    files = JobFiles(tmp_path)
    names: list[str] = []
    lost: list[str] = []
    for _ in range(2):
        takers = [start("take", tmp_path) for _ in range(2)]
        names += [files.submit(Publish(version)) for version in range(5)]
        names.append(at_work := files.submit(Publish(5, job_file_commands.HANG)))
        names += [files.submit(Publish(version)) for version in range(6, 40)]
        let_begin(*takers)
        wait_until(lambda name=at_work: any(name in each for each in taken_in(tmp_path)), "the job was taken")
        kill(*takers)
        recovered = files.recover()
        assert at_work in [taken.name for taken in recovered]
        for taken in recovered:
            lost.append(taken.name)
            taken.fail(WorkerDiedError("its process was killed.", part="test"))
    last = [start("take", tmp_path) for _ in range(2)]
    names += [files.submit(Publish(version)) for version in range(100)]
    let_begin(*last)
    (tmp_path / "end").touch()
    assert [taker.wait(HANG_S) for taker in last] == [0, 0]
    assert files.recover() == files.waiting() == []
    noted = taken_in(tmp_path)
    assert all(before < after for each in noted for before, after in pairwise(each))
    times = Counter(name for each in noted for name in each)
    assert max(times.values()) == 1
    assert set(names) - set(times) <= set(lost), "a process may be killed between its rename and its note"
    assert {*lost, *names[-100::7]} <= {each.name for each in files.failed()}
    assert list((tmp_path / "taken").iterdir()) == []


def test_what_a_killed_submitter_queued_is_whole_and_in_its_order(
    start: Callable[[str, Path], Process], tmp_path: Path
) -> None:
    files = JobFiles(tmp_path)
    submitters = [start("submit", tmp_path) for _ in range(2)]
    for submitter in submitters:
        assert submitter.stdout is not None
        assert all(submitter.stdout.readline() for _ in range(5)), "it submits and submits"
    kill(*submitters)
    assert files.recover() == []
    assert list((tmp_path / "partial").iterdir()) == [], "nothing half-written is left"
    versions: dict[str, list[int]] = {}
    while (taken := files.take()) is not None:
        if isinstance(taken.job, Publish):
            versions.setdefault(str(taken.job.adapter), []).append(taken.job.version)
        else:
            assert_same(taken.job, Forward(make_batch(0)))
        taken.done()
    assert files.failed() == []
    for submitter in submitters:
        assert submitter.stdout is not None
        told = max([6, *map(int, submitter.stdout.read().split())])
        mine = versions[f"process-{submitter.pid}"]
        assert mine == list(range(len(mine))), "in order, none is missing"
        assert len(mine) >= told
