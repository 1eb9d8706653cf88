"""Checks that every blocking call ends by its deadline, names the peer, and ends when another thread closes the half."""

from __future__ import annotations

import time

import pytest

from ...contract.capabilities import Capabilities
from ...errors import ClosedError, DeadlineExceededError, ProtocolError, TransportError, WeightlaneError
from ..processes.connection import waits_for_receivers
from ..processes.payload import Parcel
from .base import LARGE, ConformanceBase, ConnectionMaker


class DeadlineChecks(ConformanceBase):
    """Checks of silent peers and of closing."""

    def test_connect_of_the_sender_ends_by_its_deadline_when_a_receiver_never_comes(
        self, halves: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """The error names the absent receiver, and the other receivers do not wait for the sender any longer."""
        connection = halves(2).exchange_addresses()
        present, absent = connection.receivers
        patience_s = self.expiring_s + self.grace_s + 1.0  # longer than the check waits for a sender that hangs
        waits = waits_for_receivers(capabilities)
        connection.start_connect(connection.sender, self.expiring_s if waits else self.deadline_s)
        connection.start_connect(present, patience_s)
        if not waits:  # a store connects without its receivers
            connection.sender.result()
            present.result()
            return
        self.expires(connection.sender, absent)
        connection.sender.call("close")
        self.failure(present, TransportError, DeadlineExceededError, between_s=self.in_time(patience_s))

    def test_connect_of_a_receiver_ends_by_its_deadline_when_the_sender_never_comes(
        self, halves: ConnectionMaker
    ) -> None:
        """The sender has an address and lives, but never connects."""
        connection = halves(1).exchange_addresses()
        (receiver,) = connection.receivers
        connection.start_connect(receiver, self.expiring_s)
        self.expires(receiver, connection.sender)

    def test_send_ends_by_its_deadline_when_a_receiver_does_not_take_the_bucket(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """A receiver is frozen: it neither answers nor dies."""
        self.needs_waiting_sender(capabilities)
        connection = connected(2)
        frozen = connection.receivers[1]
        frozen.stop()
        connection.start_send([Parcel(1, 0, LARGE, 1)], deadline_s=self.expiring_s)
        connection.start_receive(connection.receivers[0], [Parcel(1, 0, LARGE, 1)], deadline_s=self.deadline_s)
        self.expires(connection.sender, frozen)

    def test_receive_ends_by_its_deadline_when_nothing_is_sent(self, connected: ConnectionMaker) -> None:
        """The sender is silent, alive and connected."""
        connection = connected(1)
        (receiver,) = connection.receivers
        connection.start_receive(receiver, [Parcel(1, 0, 10, 1)], deadline_s=self.expiring_s)
        self.expires(receiver, connection.sender)

    def test_receive_ends_by_its_deadline_when_the_sender_freezes_in_mid_bucket(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """A part of the bucket may have arrived before."""
        self.needs_waiting_sender(capabilities)
        connection = connected(2)
        first, second = connection.receivers
        second.stop()
        connection.start_send([Parcel(1, 0, LARGE, 1)], deadline_s=self.deadline_s)
        time.sleep(self.settle_s)
        connection.sender.stop()
        connection.start_receive(first, [Parcel(1, 0, LARGE, 1)], deadline_s=self.expiring_s)
        try:
            connection.check_received([first])  # the complete bucket may have arrived before
        except DeadlineExceededError:
            _, latest_s = self.late(self.expiring_s)
            assert first.seconds <= latest_s, (
                f"expected {first.name} to notice its deadline within {latest_s:g} s, it took {first.seconds:.2f} s"
            )

    @pytest.mark.parametrize("side", ["sender", "receiver"])
    def test_close_from_another_thread_ends_a_blocked_connect(
        self, halves: ConnectionMaker, capabilities: Capabilities, side: str
    ) -> None:
        """The call raises `ClosedError` soon."""
        if side == "sender":
            self.needs_waiting_sender(capabilities)
        connection = halves(1).exchange_addresses()
        half = connection.sender if side == "sender" else connection.receivers[0]
        half.call("close_after", seconds=self.settle_s)
        connection.start_connect(half, self.deadline_s)
        self.failure(half, ClosedError, between_s=(0.0, self.settle_s + self.slack_s))

    def test_close_from_another_thread_ends_a_blocked_receive(self, connected: ConnectionMaker) -> None:
        """The call raises `ClosedError` soon, and so does every later call."""
        connection = connected(1)
        (receiver,) = connection.receivers
        receiver.call("close_after", seconds=self.settle_s)
        connection.start_receive(receiver, [Parcel(1, 0, LARGE, 1)], deadline_s=self.deadline_s)
        self.failure(receiver, ClosedError, between_s=(0.0, self.settle_s + self.slack_s))
        connection.start_receive(receiver, [Parcel(1, 0, LARGE, 1)], deadline_s=self.deadline_s)
        self.failure(receiver, ClosedError, between_s=(0.0, self.slack_s))

    def test_close_from_another_thread_ends_a_blocked_send(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """The call raises `ClosedError` soon, and so does every later call."""
        self.needs_waiting_sender(capabilities)
        connection = connected(1)
        connection.receivers[0].stop()
        connection.sender.call("close_after", seconds=2 * self.settle_s)
        connection.start_send([Parcel(1, 0, LARGE, 1)], deadline_s=self.deadline_s)
        self.failure(connection.sender, ClosedError, between_s=(0.0, 2 * self.settle_s + self.slack_s))
        connection.start_send([Parcel(1, 0, 1000, 1)], deadline_s=self.deadline_s, allocated=False)
        self.failure(connection.sender, ClosedError, between_s=(0.0, self.slack_s))

    def test_a_closed_half_refuses_every_call(self, halves: ConnectionMaker) -> None:
        """Closing before connecting is allowed, and final."""
        connection = halves(1).exchange_addresses()
        connection.close()
        for half in connection.halves:
            connection.start_connect(half, self.deadline_s)
        for half in connection.halves:
            self.failure(half, ClosedError, between_s=(0.0, self.slack_s))

    def test_a_receiver_of_another_session_is_not_let_in(
        self, halves: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """A half of an earlier session knows the address, but not the session. Neither side accepts the other as a peer."""
        connection = halves(1).exchange_addresses()
        (receiver,) = connection.receivers
        waits = waits_for_receivers(capabilities)
        connection.start_connect(connection.sender, self.expiring_s if waits else self.deadline_s)
        connection.topology = {**connection.topology, "session": connection.topology["session"] + "-stale"}
        connection.start_connect(receiver, self.expiring_s)
        self.failure(
            receiver, ProtocolError, TransportError, DeadlineExceededError, between_s=self.in_time(self.expiring_s)
        )
        if waits:
            self.failure(connection.sender, WeightlaneError, between_s=self.in_time(self.expiring_s))
        else:
            connection.sender.result()
