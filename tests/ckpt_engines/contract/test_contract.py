"""The types of the contract: errors carry part, peer and hint through pickles and wires, and `help` explains every field."""

from __future__ import annotations

import builtins
import dataclasses
import json
import pickle
import pydoc
import re

import pytest
import torch
from waiting import MovableClock

import weightlane.ckpt_engines as public
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


def test_every_error_survives_a_pickle_and_the_wire_and_is_the_standard_one_that_a_caller_expects() -> None:
    for cls in ALL:
        standard = [base for base in cls.__mro__ if base.__module__ == builtins.__name__ and base is not Exception]
        assert cls is WeightlaneError or standard[0] not in (BaseException, object), cls
        error = cls("it broke.", part="gloo sender a", peer="b", hint="Mend it.")
        assert str(error) == "gloo sender a (peer b): it broke. Mend it."
        assert facts(pickle.loads(pickle.dumps(error))) == facts(error)
        assert facts(error_from_wire(json.loads(json.dumps(error.to_wire())))) == facts(error)
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


CLASSES = [
    cls
    for cls in (getattr(public, name) for name in public.__all__)
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and ".contract." in cls.__module__
]


def attributes(cls: type) -> dict[str, str]:
    """The section about fields in what ``help(cls)`` prints."""
    text = re.sub(r"^ \|( {2})?", "", pydoc.plain(pydoc.render_doc(cls)), flags=re.MULTILINE)
    section = text.partition("Attributes:\n")[2].partition("\n\n")[0]
    return dict(re.findall(r"^ +(\w+): (.+)$", section, re.MULTILINE))


def test_help_explains_every_field_and_every_way_of_delivery() -> None:
    assert {public.Bucket, public.Capabilities, public.Topology} <= set(CLASSES)
    for cls in (*CLASSES, public.EngineListing):
        explained = attributes(cls)
        assert [field.name for field in dataclasses.fields(cls) if field.name not in explained] == [], cls
    assert "cpu" in attributes(public.Capabilities)["devices"]
    assert set(attributes(public.Delivery)) == set(public.Delivery.__members__)
