"""How many replicas a version needs, and who may take it."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hop_run import Replica
from hypothesis import given
from hypothesis import strategies as st

from weightlane.ckpt_engines import ConfigError, PeerLostError
from weightlane.sync import ReplicaState
from weightlane.sync.control.coordinator.roster import Roster


def made(name: str, ranks: int = 1) -> Replica:
    return Replica(name, dict.fromkeys(f"{name}/{rank}" for rank in range(ranks)))  # type: ignore[arg-type]


@given(replicas=st.integers(1, 300), percent=st.integers(1, 100))
def test_a_quorum_is_the_smallest_number_that_is_that_share(replicas: int, percent: int) -> None:
    roster = Roster(["trainer-0"], [made(f"r{index}") for index in range(replicas)], percent / 100)
    assert roster.needed == math.ceil(Fraction(percent, 100) * replicas)


def test_a_replica_is_reachable_once_all_its_ranks_have_joined() -> None:
    roster = Roster(["trainer-0"], [made("r", ranks=2)], 0.5)
    assert roster.note_joined("r/0", "r/0#1")
    assert not roster.reachable()
    assert roster.note_joined("r/1", "r/1#1")
    assert [entry.name for entry in roster.reachable()] == ["r"]
    assert not roster.note_joined("r/1", "r/1#1"), "that was known"


def test_a_rank_that_comes_back_needs_a_version_first_and_one_that_was_thought_lost_is_quarantined() -> None:
    roster = Roster(["trainer-0"], [made("r")], 0.5)
    roster.note_joined("r/0", "r/0#1")
    entry = roster.entries["r"]
    entry.state, entry.version = ReplicaState.SERVING, 7
    assert roster.note_joined("r/0", "r/0#2")
    assert (entry.state, entry.version) == (ReplicaState.JOINING, -1)
    assert not roster.note_left("r/0", "r/0#1"), "the farewell of the rank that it replaces"
    roster.mark_lost(entry, PeerLostError("it does not answer.", part="test"))
    assert not roster.reachable()
    roster.note_answer("r/0")
    assert entry.state is ReplicaState.QUARANTINED
    assert roster.reachable()
    assert roster.note_left("r/0", "r/0#2")
    assert entry.state is ReplicaState.LOST


def test_replicas_that_come_and_go_during_a_version_are_checked_at_once_and_count_afterwards() -> None:
    roster = Roster(["trainer-0"], [made("r")], 1.0)
    roster.add(made("s"))
    for name in ("r", "s"):
        with pytest.raises(ConfigError, match=f"{name} takes part already"):
            roster.add(made(name))
    roster.remove("r")
    with pytest.raises(ConfigError, match="no replica is called 'r'"):
        roster.remove("r")
    assert list(roster.entries) == ["r"]
    roster.apply_changes()
    roster.add(made("r"))
    roster.apply_changes()
    assert list(roster.entries) == ["s", "r"]
