"""Environment variables are set for one block, by one thread at a time."""

from __future__ import annotations

import os
import threading

import pytest
from waiting import HANG_S

from weightlane.ckpt_engines import DeadlineExceededError
from weightlane.ckpt_engines.runtime import environment as module
from weightlane.ckpt_engines.toolkit import environment


def test_variables_are_as_before_after_the_block_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WL_SET", "before")
    monkeypatch.delenv("WL_UNSET", raising=False)
    with environment({"WL_SET": "inside", "WL_UNSET": "inside"}):
        assert (os.environ["WL_SET"], os.environ["WL_UNSET"]) == ("inside", "inside")
    with pytest.raises(LookupError), environment({"WL_SET": "inside", "WL_UNSET": "inside"}):
        raise LookupError
    assert (os.environ["WL_SET"], "WL_UNSET" in os.environ) == ("before", False)


def test_a_thread_that_never_leaves_its_block_keeps_no_other_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with environment({}):
            inside.set()
            leave.wait(HANG_S)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(HANG_S)
    monkeypatch.setattr(module, "_LONGEST_S", 0.05)
    with pytest.raises(DeadlineExceededError, match="another thread"), environment({}):
        pytest.fail("two threads were inside")
    leave.set()
    thread.join(HANG_S)
    monkeypatch.setattr(module, "_LONGEST_S", HANG_S)
    with environment({}):
        pass
