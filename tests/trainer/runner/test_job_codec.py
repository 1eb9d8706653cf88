"""Encoded jobs: what is decoded is what was encoded, and no other bytes are taken for a job."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_batches import batch_of, make_batch, make_samples
from hypothesis import given
from hypothesis import strategies as st

from weightlane.ckpt_engines import ConfigError, ProtocolError
from weightlane.trainer import AdamParams, LoraConfig, LossDenominators, MiniBatch, TokenBatch, sft
from weightlane.trainer.runner.job_codec import decode_job, encode_job
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


def test_a_job_of_every_kind_comes_back_as_it_was() -> None:
    assert {type(each) for each in EXAMPLES} == set(JOBS)
    for job in EXAMPLES:
        assert_same(decode_job(encode_job(job)), job)


def test_a_job_that_files_cannot_hold_is_refused() -> None:
    for job, said in (
        (ForwardBackward(make_batch(0), sft), "is a function"),
        (JointJob((OptimStep("a"), OptimStep("b"))), "Write its parts as jobs"),
    ):
        with pytest.raises(ConfigError, match=said):
            encode_job(job)


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
