"""Links around every half: who hung up, what a call raises, and what is left afterwards."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from link_sessions import NBYTES, Sessions, bucket, sender_of
from links import still_engine
from sessions import Session, descriptors, never, receive, send, soon, wait_until_closed
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngineRegistry,
    ClosedError,
    Deadline,
    DeadlineExceededError,
    EngineConfig,
    PeerLostError,
    TransportError,
    WeightlaneError,
    toolkit,
)
from weightlane.ckpt_engines.links.receiver_link import make_receiver_link
from weightlane.ckpt_engines.links.sender_link import make_sender_link
from weightlane.ckpt_engines.runtime.devices import HOST

pytestmark = pytest.mark.usefixtures("small_heap")


@pytest.mark.parametrize(
    ("side", "call"),
    [("s", "flush"), ("s", "reclaim"), ("s", "connect"), ("a", "flush"), ("a", "view")],
)
def test_a_peer_that_is_gone_ends_a_call_whose_half_notices_nothing_and_the_error_names_it(
    sessions: Sessions, side: str, call: str
) -> None:
    session = sessions(connect=False)
    link: Any = session.sender if side == "s" else session.receivers["a"]
    half: Any = link.half
    if call == "connect":
        half.waits.add("connect")
    connecting = session.start_connect(never())
    if call != "connect":
        for each in connecting:
            each.result()
        if side == "a":
            session.sender.post(bucket(lasting=True), ["a", "b"], soon())
            half.entered.clear()
        if call == "flush" and side == "a":
            link.post(bucket(), "s", soon())
        half.entered.clear()
    running: Future[Any] = {
        "flush": lambda: session.threads.submit(link.flush, never()),
        "reclaim": lambda: session.threads.submit(link.reclaim, 1, never()),
        "view": lambda: session.threads.submit(link.view, 1, 0, NBYTES, "s", never()),
        "connect": lambda: connecting[0 if side == "s" else 1],
    }[call]()
    assert half.entered.wait(HANG_S)
    gone = session.receivers["b"] if side == "s" else session.sender
    gone.close()
    with pytest.raises(PeerLostError) as lost:
        running.result(HANG_S)
    assert lost.value.peer == ("b" if side == "s" else "s")


def test_a_sender_that_has_lost_a_receiver_says_so_at_its_next_call_and_asks_its_half_nothing(
    sessions: Sessions,
) -> None:
    session = sessions()
    session.receivers["b"].close()
    wait_until(lambda: session.sender._lost is not None, "loss")
    with pytest.raises(PeerLostError) as lost:
        session.sender.post(bucket(), ["a"], soon())
    assert lost.value.peer == "b"
    assert sender_of(session).posted == []


def test_what_a_transport_says_of_a_death_is_told_as_the_death_of_the_peer_that_hung_up(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightlane.ckpt_engines.links.link.LOSS_WAIT_S", HANG_S)
    session = sessions()
    sender_of(session).entered.clear()  # it was set by the call that connected
    sender_of(session).fails = TransportError("NCCL error 6.", part="still half")
    flushing = session.threads.submit(session.sender.flush, soon())
    assert sender_of(session).entered.wait(HANG_S)
    session.receivers["b"].close()
    with pytest.raises(PeerLostError) as lost:
        flushing.result(HANG_S)
    assert lost.value.peer == "b"
    assert "NCCL error 6" in str(lost.value.__cause__)


def test_an_error_of_a_half_that_no_death_explains_is_told_as_it_is_and_closes_the_half(sessions: Sessions) -> None:
    for error, kind in ((TransportError("broken.", part="p"), TransportError), (ValueError("broken"), WeightlaneError)):
        session = sessions()
        sender_of(session).fails = error
        with pytest.raises(kind, match="broken") as told:
            session.sender.flush(soon())
        assert type(told.value) is kind
        assert sender_of(session).life.closed


class PlainEngine(toolkit.PairedEngine[EngineConfig]):
    """Over the framework's channels."""


def test_what_had_come_before_its_sender_hung_up_can_still_be_received(sessions: Sessions) -> None:
    session = sessions("a", engine=PlainEngine(EngineConfig()))
    sent = [torch.full((5000,), number, dtype=torch.uint8) for number in range(3)]
    for index, data in enumerate(sent):
        send(session.sender, Bucket(1, index, data), ["a"])
    session.sender.close()
    wait_until(lambda: session.receiver._lost is not None, "loss")
    for index, data in enumerate(sent):
        received = bucket(1, index, 5000)
        receive(session.receiver, received)
        assert torch.equal(received.data, data)
    with pytest.raises(PeerLostError) as lost:
        receive(session.receiver, bucket(1, 3), deadline=never())
    assert lost.value.peer == "s"


def test_peers_see_a_close_though_a_call_of_the_closed_half_does_not_end(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sessions("a")
    begun, stuck = threading.Event(), threading.Event()

    def flush(*_: object) -> None:
        begun.set()
        stuck.wait(HANG_S)

    monkeypatch.setattr(sender_of(session), "flush", flush)
    flushing = session.threads.submit(session.sender.flush, never())
    assert begun.wait(HANG_S)
    session.sender.close()
    with pytest.raises(PeerLostError):
        session.receivers["a"].post(bucket(), "s", never())
    assert not flushing.done()
    stuck.set()
    flushing.result(HANG_S)
    with pytest.raises(ClosedError):
        session.sender.flush(soon())


def test_a_reclaim_that_came_too_early_leaves_the_connection_as_it_is_and_a_flush_does_not(
    sessions: Sessions, socket_dir: Path
) -> None:
    engine = CheckpointEngineRegistry().create("shm", {"socket_dir": str(socket_dir)})
    session = sessions(engine=engine)
    data = engine.allocate(NBYTES, HOST)
    session.show(1, data)
    with pytest.raises(DeadlineExceededError):
        session.sender.reclaim(1, Deadline.after(0.05))
    session.show(2, data)
    session.release(1)
    session.sender.post(bucket(3), ["a", "b"], soon())
    with pytest.raises(DeadlineExceededError):
        session.sender.flush(Deadline.after(0.05))
    with pytest.raises(ClosedError):
        session.sender.reclaim(2, soon())


# --- what is opened, and what is left --------------------------------------------------------------------------------


def of_this_process() -> tuple[int, set[tuple[str, int]], set[str]]:
    """Its descriptors, where it listens, and the threads that watch."""
    opened = descriptors()  # first: it ends what other tests have left in reference cycles, ports among it
    links = psutil.Process().net_connections("inet")
    listening = {(link.laddr.ip, link.laddr.port) for link in links if link.status == psutil.CONN_LISTEN}
    return opened, listening, {each.name for each in threading.enumerate() if "weightlane-watch" in each.name}


def has_no_more_than(before: tuple[int, set[tuple[str, int]], set[str]]) -> bool:
    """Whether this process has nothing open that it did not have. Threads of earlier tests may have ended since."""
    opened, listening, watching = of_this_process()
    return opened <= before[0] and listening <= before[1] and watching <= before[2]


def test_halves_that_meet_in_a_store_have_no_connection_and_nobody_who_watches(tmp_path: Path) -> None:
    before = of_this_process()
    session = Session(CheckpointEngineRegistry().create("filesystem", {"path": str(tmp_path / "store")}), "r")
    assert session.topology.senders["s"]["meeting"] == {}
    _, listening, watching = of_this_process()
    assert (listening - before[1], watching - before[2]) == (set(), set())
    assert session.receiver.announced("s")
    session.send(bucket(), []).result()
    receive(session.receiver, bucket())
    session.close()
    wait_until(lambda: has_no_more_than(before), "the end of what the session opened")


@pytest.mark.parametrize("ends", ["an error", "a deadline while connecting"])
def test_no_descriptor_port_or_thread_is_left_however_it_ends(ends: str) -> None:
    before = of_this_process()
    session = Session(still_engine(), "a", "b", connect=ends == "an error")
    if ends == "an error":
        sender_of(session).fails = ValueError("broken")
        with pytest.raises(WeightlaneError):
            session.sender.flush(soon())
    else:
        connecting = [
            session.threads.submit(link.connect, session.topology, Deadline.after(0.1))
            for link in (session.sender, session.receiver)
        ]
        for each in connecting:
            assert isinstance(each.exception(HANG_S), DeadlineExceededError | PeerLostError)
    session.close()
    wait_until(lambda: has_no_more_than(before), "end of everything that was opened")


def test_a_half_that_cannot_be_made_leaves_nothing_open() -> None:
    before = descriptors()
    engine = CheckpointEngineRegistry().create("gloo", {"interface": "nosuch0"})
    for make in (make_sender_link, make_receiver_link):
        with pytest.raises(WeightlaneError, match="nosuch0"):
            make(engine, "s", HOST)
    wait_until_closed(before)
