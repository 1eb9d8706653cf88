"""Checks that the other halves raise the right error in time when the process of a peer is killed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import pytest

from ...contract.capabilities import Capabilities
from ...errors import ClosedError, DeadlineExceededError, PeerLostError, StorageError, TransportError
from ..processes.connection import Connection, waits_for_receivers
from ..processes.payload import Parcel
from ..processes.pool import RemoteHalf
from .base import LARGE, ConformanceBase, ConnectionMaker

_LOSSES = (TransportError, DeadlineExceededError, StorageError)


class DeathChecks(ConformanceBase):
    """Checks with SIGKILL on either side in every phase."""

    def test_a_receiver_killed_while_connecting_fails_the_sender_in_time(
        self, halves: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """One receiver dies after it started to connect, while the other one has not started."""
        self.needs_waiting_sender(capabilities)
        connection = halves(2).exchange_addresses()
        doomed, _ = connection.receivers
        for half in (connection.sender, doomed):
            connection.start_connect(half, self.interrupted_s)
        time.sleep(self.settle_s)
        doomed.kill()
        self.failure(connection.sender, *_LOSSES, between_s=self.in_time(self.interrupted_s))

    def test_a_sender_killed_before_connecting_fails_its_receivers_in_time(self, halves: ConnectionMaker) -> None:
        """The address is that of a dead process."""
        connection = halves(2).exchange_addresses()
        connection.sender.kill()
        for half in connection.receivers:
            connection.start_connect(half, self.interrupted_s)
        for half in connection.receivers:
            self.failure(half, *_LOSSES, names=connection.sender.name, between_s=self.in_time(self.interrupted_s))

    def test_a_sender_killed_while_connecting_fails_its_receivers_in_time(
        self, halves: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """The sender dies while it waits for its last receiver."""
        self.needs_waiting_sender(capabilities)
        connection = halves(2).exchange_addresses()
        present, _ = connection.receivers
        for half in (connection.sender, present):
            connection.start_connect(half, self.interrupted_s)
        time.sleep(self.settle_s)
        connection.sender.kill()
        self.failure(present, *_LOSSES, names=connection.sender.name, between_s=self.in_time(self.interrupted_s))

    def test_a_receiver_killed_in_mid_bucket_fails_the_sender_in_time(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """The other receiver gets the complete bucket or an error. It never hangs."""
        connection = connected(2)
        alive, doomed = connection.receivers
        self._kill_in_mid_bucket(connection, doomed, alive, self._limit_s(capabilities))
        self._check_survivors(connection, doomed, alive, capabilities)

    def test_a_sender_killed_in_mid_bucket_fails_its_receivers_in_time(self, connected: ConnectionMaker) -> None:
        """No receiver accepts a part of a bucket as the complete bucket."""
        connection = connected(2)
        first, second = connection.receivers
        second.stop()  # so that the send cannot end before the kill
        connection.start_receive(first, [Parcel(1, 0, LARGE, 1)], deadline_s=self.interrupted_s)
        connection.start_send([Parcel(1, 0, LARGE, 1)], deadline_s=self.interrupted_s, commit=False)
        time.sleep(self.settle_s)
        connection.sender.kill()
        second.resume()
        connection.start_receive(second, [Parcel(1, 0, LARGE, 1)], deadline_s=self.interrupted_s)
        self._right_or_typed([first, second], connection)

    def test_a_receiver_killed_between_buckets_fails_the_next_send_in_time(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """One bucket arrived, then a receiver dies while nothing is sent."""
        connection = connected(2)
        alive, doomed = connection.receivers
        plan = [Parcel(1, 0, 1000, 1), Parcel(1, 1, LARGE, 2)]
        connection.deliver(plan[:1], plan=plan, commit=False)
        doomed.kill()
        connection.start_receive(alive, plan[1:], deadline_s=self._limit_s(capabilities))
        connection.start_send(plan[1:], deadline_s=self._limit_s(capabilities))
        self._check_survivors(connection, doomed, alive, capabilities)

    def test_a_sender_killed_between_buckets_fails_its_receivers_in_time(self, connected: ConnectionMaker) -> None:
        """Receivers wait for the next bucket when the sender dies."""
        connection = connected(2)
        plan = [Parcel(1, 0, 1000, 1), Parcel(1, 1, LARGE, 2)]
        connection.deliver(plan[:1], plan=plan, commit=False)
        for half in connection.receivers:
            connection.start_receive(half, plan[1:], deadline_s=self.interrupted_s)
        time.sleep(self.settle_s)
        connection.sender.kill()
        for half in connection.receivers:
            self.failure(half, *_LOSSES, names=connection.sender.name, between_s=self.in_time(self.interrupted_s))

    @pytest.mark.parametrize("side", ["sender", "receiver"])
    def test_the_death_of_a_peer_is_noticed_long_before_the_deadline(
        self, connected: ConnectionMaker, capabilities: Capabilities, side: str
    ) -> None:
        """The death is reported as a `PeerLostError` within seconds, not at the deadline."""
        if side == "receiver":
            self.needs_waiting_sender(capabilities)
        elif capabilities.persistent:
            pytest.skip("the buckets of a persistent engine do not die with their sender")
        connection = connected(2)
        if side == "receiver":
            alive, doomed = connection.receivers
            self._kill_in_mid_bucket(connection, doomed, alive, self.deadline_s)
            witness = connection.sender
        else:
            witness, other = connection.receivers
            doomed = connection.sender
            connection.start_receive(witness, [Parcel(1, 0, LARGE, 1)], deadline_s=self.deadline_s)
            connection.start_receive(other, [Parcel(1, 0, LARGE, 1)], deadline_s=self.deadline_s)
            time.sleep(self.settle_s)
            doomed.kill()
        self.failure(witness, PeerLostError, names=doomed.name, between_s=(0.0, self.prompt_s))
        for half in connection.halves:
            if half is not witness and half is not doomed:
                witness.call("close")
                self._right_or_typed([half], connection, self.prompt_s + self.interrupted_s)

    @pytest.mark.parametrize("side", ["sender", "receiver"])
    def test_a_peer_killed_before_close_neither_blocks_it_nor_the_next_connection(
        self, connected: ConnectionMaker, halves: ConnectionMaker, side: str
    ) -> None:
        """Everything arrived and a peer dies. The other halves close, and a new connection works."""
        connection = connected(2)
        connection.deliver([Parcel(1, 0, 100_000, 1)])
        doomed = connection.sender if side == "sender" else connection.receivers[0]
        doomed.kill()
        for half in connection.halves:
            if half is not doomed:
                half.call("close")
                assert half.seconds < self.prompt_s, (
                    f"expected close of {half.name} within {self.prompt_s:g} s, it took {half.seconds:.1f} s"
                )
        halves(2).connect().deliver([Parcel(1, 0, 100_000, 2)])

    def _limit_s(self, capabilities: Capabilities) -> float:
        """Return the deadline (s) of calls during which a receiver dies. That does not interrupt the calls of a store."""
        return self.interrupted_s if waits_for_receivers(capabilities) else self.deadline_s

    def _check_survivors(
        self, connection: Connection, doomed: RemoteHalf, alive: RemoteHalf, capabilities: Capabilities
    ) -> None:
        """Check that the death of a receiver fails the sender, unless the engine is a store, and harms no other receiver."""
        if not waits_for_receivers(capabilities):
            connection.check_received([alive], connection.sender)
            return
        self.failure(connection.sender, *_LOSSES, names=doomed.name, between_s=self.in_time(self.interrupted_s))
        connection.sender.call("close")
        self._right_or_typed([alive], connection)

    def _kill_in_mid_bucket(
        self, connection: Connection, doomed: RemoteHalf, alive: RemoteHalf, deadline_s: float
    ) -> None:
        """Kill a receiver while a bucket is sent to all receivers."""
        parcel = Parcel(1, 0, LARGE, 1)
        doomed.stop()  # so that the send cannot end before the kill
        connection.start_receive(alive, [parcel], deadline_s=deadline_s)
        connection.start_send([parcel], deadline_s=deadline_s)
        time.sleep(self.settle_s)
        doomed.kill()

    def _right_or_typed(
        self, receivers: Sequence[RemoteHalf], connection: Connection, within_s: float | None = None
    ) -> None:
        """Check that each receiver got the right bytes, or a typed error in time."""
        for half in receivers:
            with contextlib.suppress(*_LOSSES, ClosedError):
                connection.check_received([half])
            latest_s = (within_s or self.interrupted_s) + self.slack_s
            assert half.seconds <= latest_s, (
                f"expected receive of {half.name} to end within {latest_s:g} s, it took {half.seconds:.1f} s"
            )
