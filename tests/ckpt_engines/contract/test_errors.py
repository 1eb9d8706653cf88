"""The error tree: every class carries part, peer and hint through pickles and over the wire."""

from __future__ import annotations

import builtins
import json
import pickle

import pytest
import torch
from waiting import MovableClock

from weightlane.ckpt_engines import (
    Bucket,
    Deadline,
    DeadlineExceededError,
    PeerLostError,
    ProtocolError,
    SyncAbortedError,
    WeightlaneError,
    as_weightlane_error,
    error_from_wire,
)


def tree(cls: type[WeightlaneError]) -> list[type[WeightlaneError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in tree(child))]


ALL = [cls for cls in tree(WeightlaneError) if cls.__module__.startswith("weightlane.")]


def facts(error: WeightlaneError) -> tuple[object, ...]:
    return type(error), error.message, error.part, error.peer, error.hint, str(error)


def test_every_error_survives_a_pickle_and_the_wire() -> None:
    for cls in ALL:
        error = cls("it broke.", part="gloo sender a", peer="b", hint="Mend it.")
        assert str(error) == "gloo sender a (peer b): it broke. Mend it."
        assert facts(pickle.loads(pickle.dumps(error))) == facts(error)
        assert facts(error_from_wire(json.loads(json.dumps(error.to_wire())))) == facts(error)


def test_every_error_is_also_the_standard_one_a_caller_would_expect() -> None:
    for cls in ALL[1:]:
        standard = [base for base in cls.__mro__ if base.__module__ == builtins.__name__ and base is not Exception]
        assert standard[0] not in (BaseException, object), cls
    assert issubclass(DeadlineExceededError, TimeoutError)
    assert issubclass(PeerLostError, ConnectionError)


def test_an_abort_carries_its_reason_through_a_pickle() -> None:
    error = SyncAbortedError.because(7, PeerLostError("gone.", part="shm sender", peer="rollout-1"))
    again = pickle.loads(pickle.dumps(error))
    assert again.version == 7
    assert isinstance(again.reason, PeerLostError)
    assert again.reason.peer == "rollout-1"
    assert "rollout-1" in str(again)


def test_an_error_of_an_unknown_type_arrives_with_its_text() -> None:
    error = error_from_wire({"type": "AcmeError", "message": "m.", "part": "p", "peer": "", "hint": ""})
    assert type(error) is WeightlaneError
    assert str(error) == "p: m."
    assert str(error_from_wire({})) == "unknown part: no message"


def test_a_foreign_exception_is_named_and_kept_as_the_cause() -> None:
    cause = KeyError("x")
    error = as_weightlane_error(cause, "publisher")
    assert error.__cause__ is cause
    assert str(error) == "publisher: unexpected KeyError: 'x'"
    assert as_weightlane_error(error, "other") is error


def test_a_deadline_says_what_it_waited_for_and_is_shared_by_the_waits_below() -> None:
    clock = MovableClock()
    deadline = Deadline.after(10, clock)
    assert deadline.within(4).remaining_s == 4
    clock.advance(7)
    deadline.check("nothing", part="x")
    assert deadline.within(4).remaining_s == deadline.remaining_s == 3
    clock.advance(3)
    assert deadline.expired
    assert deadline.remaining_s == 0
    assert deadline.timedelta().total_seconds() > 0
    with pytest.raises(DeadlineExceededError, match="waiting for the moon") as failure:
        deadline.check("the moon", part="watcher", peer="moon")
    assert failure.value.peer == "moon"


def test_a_bucket_is_contiguous_one_dimensional_bytes_or_is_not_made() -> None:
    wrong_shape = torch.zeros((2, 2), dtype=torch.uint8)
    for data in (torch.zeros(4), wrong_shape, torch.zeros(8, dtype=torch.uint8)[::2]):
        with pytest.raises(ProtocolError, match="contiguous"):
            Bucket(1, 0, data)
    assert Bucket(1, 0, torch.empty(0, dtype=torch.uint8)).nbytes == 0
