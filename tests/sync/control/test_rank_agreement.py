"""Ranks agree by two messages each, and lists of tensors are sent once for a session."""

from __future__ import annotations

import pytest
import torch
from hub_calls import raised_by, value_counts
from sessions import never, soon
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import ClosedError, Deadline, DeadlineExceededError
from weightlane.sync import Manifest, Rendezvous, TensorSpec
from weightlane.sync.control.tensor_lists import TensorLists
from weightlane.sync.send.agreement.rank_agreement import Interrupt, RankAgreement

NAMES = [f"t-{rank}" for rank in range(3)]


# -- ranks that agree ----------------------------------------------------------------------------------------------------


def talks(rendezvous: Rendezvous) -> list[RankAgreement]:
    return [RankAgreement(rendezvous.mailbox("agreement/s"), NAMES, rank) for rank in range(3)]


def test_ranks_hear_one_another_by_two_messages_each_old_versions_go_and_a_silent_rank_is_named(
    rendezvous: Rendezvous,
) -> None:
    ranks = talks(rendezvous)
    kept = []
    for version in range(1, 9):
        before, _ = rendezvous.traffic
        for rank, talk in enumerate(ranks):
            talk.say("deltas", version, [version, rank])
        for talk in ranks:
            assert list(talk.hear("deltas", version, soon(), Interrupt()).items()) == [
                (name, [version, rank]) for rank, name in enumerate(NAMES)
            ]
        assert rendezvous.traffic[0] - before <= 4 * len(ranks), "say, ask, answer, and one to forget"
        kept.append(sum(value_counts(rendezvous).values()))
    assert kept[-1] == kept[2], "it grows with every version"
    for talk in (ranks[0], ranks[2]):
        talk.say("deltas", 9, None)
    with pytest.raises(DeadlineExceededError, match="the deltas of version 9") as caught:
        ranks[0].hear("deltas", 9, Deadline.after(0.05), Interrupt())
    assert caught.value.peer == "t-1"


def test_a_rank_hears_the_others_no_longer_than_it_wants(rendezvous: Rendezvous) -> None:
    first, second, _ = talks(rendezvous)
    superseded, other = Interrupt(), Interrupt()
    thread, errors = raised_by(lambda: first.hear("deltas", 1, never(), superseded))
    wait_until(lambda: bool(superseded._waits), "rank that hears")
    other.set()
    assert superseded._waits, "another version is superseded"
    superseded.set()
    thread.join(HANG_S)
    closed, others = raised_by(lambda: second.hear("deltas", 1, never(), Interrupt()))
    wait_until(lambda: bool(second._session_over._waits), "rank that hears")
    second.close()
    closed.join(HANG_S)
    assert [type(error) for error in (*errors, *others)] == [ClosedError, ClosedError]
    for rank, interrupt in ((first, superseded), (second, Interrupt())):
        with pytest.raises(ClosedError):
            rank.hear("deltas", 1, never(), interrupt)


# -- manifests by reference ----------------------------------------------------------------------------------------------


def manifest(version: int = 0) -> Manifest:
    specs = tuple(TensorSpec(f"w.{number}", (3, number), torch.float32) for number in range(40))
    return Manifest(version, specs, 1024)


def test_a_list_of_tensors_is_sent_once_for_a_session(rendezvous: Rendezvous) -> None:
    trainer, rollout, model = TensorLists(), TensorLists(), manifest()
    for session in ("s-1", "s-2"):
        board = rendezvous.mailbox(f"tensors/{session}")
        for version in range(3):
            offered = model.as_version(version, "")
            before = rendezvous.traffic
            plain = trainer.referred_to(offered.to_plain(), board, session)
            assert isinstance(plain["tensors"], str)
            assert Manifest.from_plain(rollout.looked_up(plain, board, soon())) == offered
            assert version == 0 or rendezvous.traffic == before, "it is there already"
        assert value_counts(rendezvous)[f"tensors/{session}"] == 1
