"""What every engine does when something breaks: the right typed error, on every side, within the deadline."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from weightlane.ckpt_engines import (
    Capabilities,
    ClosedError,
    DeadlineExceededError,
    Delivery,
    PeerLostError,
    ProtocolError,
    TransportError,
)

LARGE = 64 << 20
"""More than any socket buffers."""
SLACK_S = 1.0


def test_a_sender_learns_at_once_that_a_receiver_was_killed_in_mid_transfer(
    connected: Callable[[int], Any], capabilities: Capabilities
) -> None:
    connection = connected(2)
    alive, doomed = connection.receivers
    doomed.signal(signal.SIGSTOP)  # so that the transfer cannot be over before the kill
    connection.start_send([[1, 0, LARGE, 1]], deadline_s=30)
    connection.start_receive(alive, [[1, 0, LARGE, 1]], deadline_s=30)
    time.sleep(0.5)
    doomed.signal(signal.SIGKILL)
    if Delivery.STORE in capabilities.delivery:  # nobody waits for the receivers of a store
        connection.sender.result()
        assert alive.result() == [True]
        return
    with pytest.raises(PeerLostError) as failure:
        connection.sender.result()
    assert doomed.name in str(failure.value)
    assert connection.sender.seconds < 10
    connection.sender.call("close")
    with contextlib.suppress(
        PeerLostError
    ):  # the other receiver got all of it, or learns the failure: it does not hang
        assert alive.result() == [True]
    assert alive.seconds < 10


def test_receivers_learn_at_once_that_the_sender_was_killed(connected: Callable[[int], Any]) -> None:
    connection = connected(2)
    connection.deliver([[1, 0, 1000, 1]])
    for half in connection.receivers:
        connection.start_receive(half, [[1, 1, LARGE, 1]], deadline_s=30)
    time.sleep(0.2)
    connection.sender.signal(signal.SIGKILL)
    for half in connection.receivers:
        with pytest.raises(PeerLostError) as failure:
            half.result()
        assert "trainer/0" in str(failure.value)
        assert half.seconds < 5


def test_a_receiver_that_stops_costs_the_sender_no_more_than_its_deadline(
    connected: Callable[[int], Any], capabilities: Capabilities
) -> None:
    if Delivery.STORE in capabilities.delivery:
        pytest.skip("nobody waits for the receivers of a store")
    connection = connected(2)
    stopped = connection.receivers[1]
    stopped.signal(signal.SIGSTOP)
    connection.start_send([[1, 0, LARGE, 1]], deadline_s=1.5)
    with pytest.raises(DeadlineExceededError) as failure:
        connection.sender.result()
    assert stopped.name in str(failure.value)
    assert 1.4 < connection.sender.seconds < 1.5 + SLACK_S


def test_a_sender_that_sends_nothing_costs_a_receiver_no_more_than_its_deadline(
    connected: Callable[[int], Any],
) -> None:
    connection = connected(1)
    (receiver,) = connection.receivers
    connection.start_receive(receiver, [[1, 0, 10, 1]], deadline_s=0.7)
    with pytest.raises(DeadlineExceededError):
        receiver.result()
    assert 0.6 < receiver.seconds < 0.7 + SLACK_S


def test_connect_ends_by_its_deadline_when_a_receiver_never_comes(
    halves: Callable[[int], Any], capabilities: Capabilities
) -> None:
    connection = halves(2)
    connection.exchange_addresses()
    present, absent = connection.receivers
    connection.start_connect(connection.sender, deadline_s=1.0)
    connection.start_connect(present, deadline_s=5.0)
    if Delivery.STORE in capabilities.delivery:  # a store is there without its receivers
        connection.sender.result()
        present.result()
        return
    with pytest.raises(DeadlineExceededError, match=absent.name):
        connection.sender.result()
    with pytest.raises(PeerLostError):  # the sender gave up
        present.result()
    for half in (connection.sender, present):
        assert 0.8 < half.seconds < 1.0 + SLACK_S


def test_connect_ends_by_its_deadline_when_the_sender_never_comes(halves: Callable[[int], Any]) -> None:
    connection = halves(1)
    connection.exchange_addresses()
    (receiver,) = connection.receivers
    connection.start_connect(receiver, deadline_s=1.0)
    with pytest.raises(DeadlineExceededError):
        receiver.result()
    assert 0.9 < receiver.seconds < 1.0 + SLACK_S


def test_connect_fails_at_once_when_the_sender_is_dead(
    halves: Callable[[int], Any], engine_name: str, engine_options: dict[str, Any]
) -> None:
    connection = halves(1)
    connection.exchange_addresses()
    connection.sender.signal(signal.SIGKILL)
    (receiver,) = connection.receivers
    connection.start_connect(receiver, deadline_s=20.0)
    with pytest.raises(PeerLostError):
        receiver.result()
    assert receiver.seconds < 5
    # What the killed sender left behind goes when the next one starts.
    receiver.call("make", side="sender", engine=engine_name, options=engine_options, name="trainer/1")
    receiver.call("address")


def test_connect_of_the_sender_fails_at_once_when_a_receiver_dies_meanwhile(
    halves: Callable[[int], Any], capabilities: Capabilities
) -> None:
    if Delivery.STORE in capabilities.delivery:
        pytest.skip("nobody waits for the receivers of a store")
    connection = halves(2)
    connection.exchange_addresses()
    doomed, _ = connection.receivers
    for half in (connection.sender, doomed):
        connection.start_connect(half, deadline_s=20.0)
    time.sleep(0.5)
    doomed.signal(signal.SIGKILL)
    with pytest.raises(PeerLostError):
        connection.sender.result()
    assert connection.sender.seconds < 5


@pytest.mark.parametrize("wrong", [[1, 1, 4096, 1], [2, 0, 4096, 1], [1, 0, 4097, 1]], ids=["index", "version", "size"])
def test_a_receiver_that_waits_for_another_bucket_gets_a_protocol_error(
    connected: Callable[[int], Any], capabilities: Capabilities, wrong: list[int]
) -> None:
    connection = connected(1)
    (receiver,) = connection.receivers
    connection.start_send([[1, 0, 4096, 1]])
    if Delivery.STORE in capabilities.delivery:
        connection.sender.result()
        connection.start_receive(receiver, [wrong], deadline_s=0.5)
        with pytest.raises(ProtocolError if wrong[2] != 4096 else DeadlineExceededError):
            receiver.result()
        return
    connection.start_receive(receiver, [wrong])
    with pytest.raises(ProtocolError, match="expected version"):
        receiver.result()
    try:  # a small bucket may have left the sender before the refusal came: then the next one meets it
        connection.sender.result()
        connection.start_send([[1, 1, LARGE, 1]])
        connection.sender.result()
    except (ProtocolError, PeerLostError):
        return
    pytest.fail("the sender did not notice")


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_close_from_another_thread_ends_a_blocked_connect(
    halves: Callable[[int], Any], capabilities: Capabilities, side: str
) -> None:
    if side == "sender" and Delivery.STORE in capabilities.delivery:
        pytest.skip("nobody waits for the receivers of a store")
    connection = halves(1)
    connection.exchange_addresses()
    half = connection.sender if side == "sender" else connection.receivers[0]
    half.call("close_after", seconds=0.4)
    connection.start_connect(half, deadline_s=20)
    with pytest.raises(ClosedError):
        half.result()
    assert half.seconds < 2


def test_close_from_another_thread_ends_a_blocked_receive(connected: Callable[[int], Any]) -> None:
    connection = connected(1)
    (receiver,) = connection.receivers
    receiver.call("close_after", seconds=0.4)
    connection.start_receive(receiver, [[1, 0, LARGE, 1]], deadline_s=20)
    with pytest.raises(ClosedError):
        receiver.result()
    assert receiver.seconds < 2
    connection.start_receive(receiver, [[1, 0, LARGE, 1]], deadline_s=20)
    with pytest.raises(ClosedError):
        receiver.result()


def test_close_from_another_thread_ends_a_blocked_send(
    connected: Callable[[int], Any], capabilities: Capabilities
) -> None:
    if Delivery.STORE in capabilities.delivery:
        pytest.skip("nobody waits for the receivers of a store")
    connection = connected(1)
    connection.sender.call("close_after", seconds=0.6)
    connection.start_send([[1, 0, LARGE, 1]], deadline_s=20)
    with pytest.raises(ClosedError):
        connection.sender.result()
    assert connection.sender.seconds < 3


def test_sending_to_somebody_unknown_is_refused(connected: Callable[[int], Any], capabilities: Capabilities) -> None:
    if Delivery.STORE in capabilities.delivery:
        pytest.skip("a store does not know its receivers")
    connection = connected(1)
    connection.sender.start("send", buckets=[[1, 0, 4, 1]], receivers=["nobody"], deadline_s=5, allocated=True)
    with pytest.raises(ProtocolError, match="nobody"):
        connection.sender.result()


def test_a_session_of_another_connection_is_not_let_in(
    halves: Callable[[int], Any], capabilities: Capabilities
) -> None:
    connection = halves(1)
    (receiver,) = connection.receivers
    connection.exchange_addresses("session-of-the-sender")
    connection.start_connect(connection.sender, deadline_s=1.0)
    connection.topology["session"] = "session-of-somebody-else"
    connection.start_connect(receiver, deadline_s=1.0)
    with pytest.raises(
        DeadlineExceededError if Delivery.STORE in capabilities.delivery else (ProtocolError, TransportError)
    ):
        receiver.result()
    if Delivery.STORE not in capabilities.delivery:
        with pytest.raises(DeadlineExceededError):
            connection.sender.result()
    else:
        connection.sender.result()
