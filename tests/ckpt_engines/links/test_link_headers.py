"""Headers of buckets are compared and signed ahead of the engine."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from link_sessions import NBYTES, Sessions, bucket, receiver_of, sender_of
from links import KEY, SESSION, StillReceiver, still_engine, told_by
from sessions import never, soon
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import Bucket, ProtocolError, Topology
from weightlane.ckpt_engines.channels.mac import proof
from weightlane.ckpt_engines.links.receiver_link import make_receiver_link
from weightlane.ckpt_engines.runtime.devices import HOST


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
    ("wanted", "by"),
    [(bucket(version=2), "post"), (bucket(index=1), "view"), (bucket(nbytes=NBYTES + 1), "post")],
    ids=["version", "index", "size"],
)
def test_a_receiver_that_waits_for_another_bucket_ends_the_call_of_both_sides_and_closes_the_senders_half(
    sessions: Sessions, wanted: Bucket, by: str
) -> None:
    session = sessions()
    flushing = session.send(bucket(), deadline=never())
    receiver = session.receivers["a"]
    waits_for = {
        "post": lambda: receiver.post(wanted, "s", never()),
        "view": lambda: receiver.view(wanted.version, wanted.index, wanted.nbytes, "s", never()),
    }
    with pytest.raises(ProtocolError, match=f"of {wanted.nbytes} bytes, but the sender offers version 1") as refused:
        waits_for[by]()
    assert refused.value.peer == "s"
    assert receiver_of(session).posted == []
    with pytest.raises(ProtocolError, match=f"refused a bucket: it waits for bucket {wanted.index}") as told:
        flushing.result(HANG_S)
    assert told.value.peer == "a"
    assert sender_of(session).life.closed
    with pytest.raises(ProtocolError, match="refused a bucket"):  # as does every later call
        session.sender.post(bucket(index=1), ["a"], soon())


def test_a_bucket_for_somebody_unknown_is_refused_before_anybody_hears_of_it(sessions: Sessions) -> None:
    session = sessions()
    with pytest.raises(ProtocolError, match="not connected to nobody"):
        session.sender.post(bucket(), ["a", "nobody"], soon())
    assert sender_of(session).posted == []
    assert not session.receivers["b"].announced("s")
    with pytest.raises(ProtocolError, match="not connected to nobody"):
        session.receivers["b"].post(bucket(), "nobody", soon())


def header(said: Any, claim: object = None) -> dict[str, Any]:
    right = proof(KEY, "weightlane bucket", SESSION, json.dumps(said))
    return {"bucket": said, "proof": right if claim is None else claim}


RIGHT = [1, 0, NBYTES, True, "xxh3:1"]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (header(RIGHT, "0" * 64), "not the sender's"),
        ({"bucket": RIGHT}, "not the sender's"),
        (header(RIGHT, proof(KEY, "weightlane bucket", "other", json.dumps(RIGHT))), "not the sender's"),
        ({**header(RIGHT), "bucket": [*RIGHT[:4], "xxh3:2"]}, "not the sender's"),
        (header([*RIGHT, 1]), "the sender offers"),
        (header([1, 0, NBYTES, True, None]), "the sender offers"),
        (header({"version": 1}), "the sender offers"),
        ({"refused": "no"}, "not the sender's"),
    ],
)
def test_a_header_that_the_sender_has_not_made_or_that_is_none_is_refused(message: dict[str, Any], said: str) -> None:
    with told_by(lambda channel: channel.send_json(header(RIGHT), soon())) as link:
        assert link.post(bucket(), "s", soon()) == "xxh3:1"
    with told_by(lambda channel: channel.send_json(message, soon())) as link:
        with pytest.raises(ProtocolError, match=said):
            link.post(bucket(), "s", soon())
        assert cast("StillReceiver", link.half).posted == []


def test_an_address_that_is_not_a_links_is_refused(sessions: Sessions) -> None:
    session = sessions("a", connect=False)
    for address in ({}, {"meeting": 5, "engine": {}}, {"meeting": {"host": "127.0.0.1"}, "engine": {}}):
        link = make_receiver_link(still_engine(), "a", HOST)
        with pytest.raises(ProtocolError, match=r"not (the|an) address"):
            link.connect(Topology(SESSION, {"s": address}, session.topology.receivers, KEY), soon())
        link.close()
