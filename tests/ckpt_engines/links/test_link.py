"""Links around every half: headers that are compared and signed, who hung up, what a call raises, and what is left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from links import KEY, SESSION, StillReceiver, StillSender, still_engine, told_by
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
    ProtocolError,
    Topology,
    TransportError,
    WeightlaneError,
    toolkit,
)
from weightlane.ckpt_engines.channels.channel import Channel
from weightlane.ckpt_engines.links import ReceiverLink, SenderLink
from weightlane.ckpt_engines.runtime.devices import HOST

pytestmark = pytest.mark.usefixtures("small_heap")
NBYTES = 4096
Sessions = Callable[..., Session]


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    """Makes sessions, over halves that do nothing unless told otherwise."""
    made: list[Session] = []

    def make(*names: str, engine: Any = None, **more: Any) -> Session:
        made.append(Session(engine or still_engine(), *(names or ("a", "b")), **more))
        return made[-1]

    yield make
    for session in made:
        session.close()


def bucket(version: int = 1, index: int = 0, nbytes: int = NBYTES, **more: Any) -> Bucket:
    return Bucket(version, index, torch.zeros(nbytes, dtype=torch.uint8), **more)


def sender_of(session: Session) -> StillSender:
    return cast("StillSender", session.sender.half)


def receiver_of(session: Session, name: str = "a") -> StillReceiver:
    return cast("StillReceiver", session.receivers[name].half)


@pytest.mark.parametrize(("side", "call"), [("s", "flush"), ("s", "connect"), ("a", "view")])
def test_a_peer_that_is_gone_ends_a_call_whose_half_notices_nothing_and_the_error_names_it(
    sessions: Sessions, side: str, call: str
) -> None:
    session = sessions(connect=False)
    link: Any = session.sender if side == "s" else session.receivers["a"]
    if call == "connect":
        link.half.waits.add("connect")
    connecting = session.start_connect(never())
    running = connecting[0]
    if call != "connect":
        for each in connecting:
            each.result()
        session.sender.post(bucket(lasting=True), ["a", "b"], soon())
        link.half.entered.clear()
        wait = (link.flush, never()) if call == "flush" else (link.view, 1, 0, NBYTES, "s", never())
        running = session.threads.submit(*wait)
    assert link.half.entered.wait(HANG_S)
    gone = session.receivers["b"] if side == "s" else session.sender
    gone.close()
    with pytest.raises(PeerLostError) as lost:
        running.result(HANG_S)
    assert lost.value.peer == ("b" if side == "s" else "s")


def test_what_a_transport_says_of_a_death_is_told_as_the_death_of_the_peer_that_hung_up(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightlane.ckpt_engines.links.LOSS_WAIT_S", HANG_S)
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


def watching() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "weightlane-watch" in thread.name}


def test_no_descriptor_port_or_thread_is_left_of_halves_that_never_met() -> None:
    before, watched = descriptors(), watching()
    session = Session(still_engine(), "a", "b", connect=False)
    for link in (session.sender, session.receiver):
        with pytest.raises((DeadlineExceededError, PeerLostError)):
            link.connect(session.topology, Deadline.after(0.1))
    session.close()
    wait_until_closed(before)
    wait_until(lambda: watching() <= watched, "end of the threads that watch")


def test_a_half_that_cannot_be_made_leaves_nothing_open() -> None:
    before = descriptors()
    engine = CheckpointEngineRegistry().create("gloo", {"interface": "nosuch0"})
    for kind in (SenderLink, ReceiverLink):
        with pytest.raises(WeightlaneError, match="nosuch0"):
            kind.of(engine, "s", HOST)
    wait_until_closed(before)


def test_a_header_says_checksum_and_whether_everybody_gets_the_bucket_ahead_of_the_engine(sessions: Sessions) -> None:
    session = sessions()
    session.sender.post(bucket(), ["b", "a"], soon(), "xxh3:1")
    session.sender.post(bucket(index=1), ["a"], soon())
    a, b = session.receivers["a"], session.receivers["b"]
    assert [a.post(bucket(), "s", soon()), a.post(bucket(index=1), "s", soon())] == ["xxh3:1", ""]
    receiver_of(session, "b").over.set()
    assert b.view(1, 0, NBYTES, "s", soon())[1] == "xxh3:1"
    for half in (sender_of(session), receiver_of(session)):
        assert [each.to_all for each in half.posted] == [True, False]


def test_a_bucket_is_announced_when_its_header_is_there(sessions: Sessions) -> None:
    session = sessions("a")
    link = session.receivers["a"]
    assert not link.announced("s")
    session.sender.post(bucket(), ["a"], soon())
    wait_until(lambda: link.announced("s"), "header")
    link.post(bucket(), "s", soon())
    assert not link.announced("s")


@pytest.mark.parametrize(
    "wanted", [bucket(version=2), bucket(index=1), bucket(nbytes=NBYTES + 1)], ids=["version", "index", "size"]
)
def test_a_receiver_that_waits_for_another_bucket_ends_the_call_of_both_sides_and_closes_the_senders_half(
    sessions: Sessions, wanted: Bucket
) -> None:
    session = sessions()
    flushing = session.send(bucket(), deadline=never())
    with pytest.raises(ProtocolError, match=f"of {wanted.nbytes} bytes, but the sender offers version 1") as refused:
        session.receivers["a"].post(wanted, "s", never())
    assert refused.value.peer == "s"
    assert receiver_of(session).posted == []
    with pytest.raises(ProtocolError, match=f"refused a bucket: it waits for bucket {wanted.index}") as told:
        flushing.result(HANG_S)
    assert told.value.peer == "a"
    assert sender_of(session).life.closed
    with pytest.raises(ProtocolError, match="refused a bucket"):  # as does every later call
        session.sender.post(bucket(index=1), ["a"], soon())


def test_a_header_that_the_sender_has_not_made_or_that_is_none_is_refused() -> None:
    def repeat(channel: Channel) -> None:
        for channel._sent in (1, 1):  # the welcome was message 0
            channel.send_json({"bucket": [1, 0, NBYTES, True, None, "xxh3:1"]}, soon())

    with told_by(repeat) as link:
        assert link.post(bucket(), "s", soon()) == "xxh3:1"
        with pytest.raises(ProtocolError, match="not signed"):
            link.post(bucket(), "s", soon())
        assert len(cast("StillReceiver", link.half).posted) == 1
    with told_by(lambda channel: channel.send_json({"bucket": [1, 0, NBYTES, True, None, None]}, soon())) as link:
        with pytest.raises(ProtocolError, match="the sender offers"):
            link.post(bucket(), "s", soon())
        assert cast("StillReceiver", link.half).posted == []


def test_an_address_that_is_not_a_links_is_refused(sessions: Sessions) -> None:
    session = sessions("a", connect=False)
    for address in ({}, {"sockets": 5, "engine": {}}, {"sockets": {"host": "127.0.0.1"}, "engine": {}}):
        link = ReceiverLink.of(still_engine(), "a", HOST)
        with pytest.raises(ProtocolError, match=r"not (the|an) address"):
            link.connect(Topology(SESSION, {"s": address}, session.topology.receivers, KEY), soon())
        link.close()
