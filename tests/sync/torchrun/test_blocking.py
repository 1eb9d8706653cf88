"""`CollectivePublisher`: what a plain training script is promised, on a real hop within this process."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from collective_rank import Rank
from patience import PATIENT
from shelf import SPEC, Shelf
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import (
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    ReplicaTakenError,
    SyncAbortedError,
    UnknownEngineError,
    UntouchedError,
    WorkerDiedError,
)
from weightlane.sync import CollectivePublisher, LocalShard, Outcome, SyncConfig


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.zeros(SPEC.shape)


def publisher(weight: torch.Tensor, *replicas: Shelf, **settings: Any) -> CollectivePublisher:
    settings = {"backend": "shm", "config": SyncConfig(**PATIENT)} | settings
    return CollectivePublisher([LocalShard.whole(SPEC, weight)], replicas, **settings)


@pytest.fixture(autouse=True)
def threads_before() -> None:
    """Threads of earlier tests in this process are not this one's."""
    _before[:] = threading.enumerate()


_before: list[threading.Thread] = []


def threads() -> set[str]:
    ours = [thread for thread in threading.enumerate() if thread not in _before]
    return {thread.name for thread in ours if thread.name.startswith("weightlane-")}


def wait_for_end_of_threads() -> None:
    """Closing tells a pool's threads to end, and does not wait for that: one of them may be stuck in a call."""
    wait_until(lambda: not threads(), "end of the threads")


def test_every_version_published_is_served_in_order_and_the_last_one_when_the_block_ends(weight: torch.Tensor) -> None:
    shelf = Shelf()
    with publisher(weight, shelf) as weights:
        for version in (1, 2, 5):
            weights.fence()
            weight.fill_(version)
            weights.publish(version)
        report = weights.wait()
        assert report is not None
        assert report.version == 5
        assert weights.wait() is None, "it was asked for"
        assert shelf.shows(5.0)
        weights.fence()
        weight.fill_(6)
        weights.publish(6)
    assert shelf.shows(6.0)
    with pytest.raises(ClosedError):
        weights.publish(7)
    shelf.close()
    wait_for_end_of_threads()


def test_a_version_that_fails_is_logged_and_replaced_by_the_next_until_too_many_fail_in_a_row(
    weight: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf()
    with publisher(weight, shelf, max_failed=2) as weights:
        weights.publish(1)
        weights.wait()
        shelf.fails = UntouchedError("no room on the shelf.", part="shelf")
        weights.publish(2)
        with pytest.raises(SyncAbortedError, match="no room on the shelf"):
            weights.wait()
        weights.publish(3)
        with caplog.at_level(logging.WARNING):
            weights.publish(4)
        assert "version 3 was not committed" in caplog.text
        with pytest.raises(SyncAbortedError, match="version 4"):
            weights.publish(5)
        shelf.fails = None
        weights.publish(5)
    assert shelf.connections == 1
    shelf.close()


def test_a_replica_that_was_lost_is_called_back_for_the_next_version_unless_another_publisher_has_it(
    weight: torch.Tensor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def taken(*_: object) -> None:
        raise ReplicaTakenError("it follows another publisher.", part="mortal")

    async def refused(*_: object) -> None:
        raise ConnectionRefusedError

    steady, mortal = Shelf("steady"), Shelf("mortal")
    with publisher(weight, steady, mortal) as weights:
        weights.publish(1)
        weights.wait()
        mortal.fails = WorkerDiedError("gone.", part="mortal")
        weights.publish(2)
        report = weights.wait()
        assert report is not None
        assert report.replicas["mortal"].outcome is Outcome.LOST
        assert "version 2 was committed without mortal, which is lost" in caplog.text
        mortal.fails = None
        weight.fill_(3)
        weights.publish(3)
        report = weights.wait()
        assert report is not None
        assert {part.outcome for part in report.replicas.values()} == {Outcome.COMMITTED}
        assert (steady.connections, mortal.connections) == (1, 2)
        assert mortal.shows(3.0)
        mortal.fails = WorkerDiedError("gone.", part="mortal")
        weights.publish(4)
        weights.wait()
        monkeypatch.setattr(mortal, "connect", refused)
        weights.publish(5)
        weights.wait()
        assert steady.shows(3.0)
        monkeypatch.setattr(mortal, "connect", taken)
        weights.publish(6)
        with pytest.raises(ReplicaTakenError):  # at once: what may fail and be published again is something else
            weights.publish(7)
        assert steady._rank is not None
        with pytest.raises(SyncAbortedError, match="follows another publisher"):  # everybody hears it
            steady._rank.end.wait(6, HANG_S)
    steady.close()
    mortal.close()


def test_what_keeps_it_from_connecting_is_named_and_leaves_nothing_running(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    with pytest.raises(ConfigError, match="no replica"):
        publisher(weight)
    shelves = [Shelf(), Shelf()]
    with pytest.raises(ConfigError, match="rollout-0 takes part already"):
        publisher(weight, *shelves)
    with pytest.raises(UnknownEngineError):
        publisher(weight, shelves[0], backend="shn")
    monkeypatch.setattr(shelves[0], "connect", never)
    with pytest.raises(DeadlineExceededError, match="rollout-0") as caught:
        publisher(weight, shelves[0], config=SyncConfig(**PATIENT | {"connect_timeout_s": 0.2}))
    assert caught.value.peer == "rollout-0"
    for shelf in shelves:
        shelf.close()
    wait_for_end_of_threads()


def test_two_ranks_both_learn_what_kept_one_from_connecting_and_then_publish_together_or_one_of_them_alone(
    free_port: int, start: Any
) -> None:
    ranks = [start(Rank, rank=rank, port=free_port) for rank in range(2)]
    for rank in ranks:
        rank.is_ready()
    for unwilling in (True, False):
        for rank in ranks:
            rank.tell("publish", unwilling)
        for rank in ranks:
            with pytest.raises(ConfigError, match=r"rollout-0: not today\.") if unwilling else nullcontext():
                rank.answer()
    assert ranks[0].call("publish_alone")
    for rank in ranks:
        rank.call("close")
