"""Checks that the right bytes reach the right receivers in order, from memory that may be reused at once."""

from __future__ import annotations

import pytest

from ...contract.capabilities import Capabilities, Delivery
from ...contract.engine import MOST_POSTED
from ...errors import DeadlineExceededError, PeerLostError, ProtocolError, WeightlaneError
from ..processes.connection import waits_for_receivers
from ..processes.payload import Parcel
from .base import LARGE, MIB, ConformanceBase, ConnectionMaker

_LATE_S = 0.12
"""Seconds by which a slow receiver is later than the sender."""


class DeliveryChecks(ConformanceBase):
    """Checks of the delivered bytes."""

    @pytest.mark.parametrize("receivers", [1, 2, 5])
    def test_every_receiver_gets_every_byte(self, connected: ConnectionMaker, receivers: int) -> None:
        """One, two and five receivers get the same bytes."""
        sizes = [3 * MIB + 1, 1, 0, 64 * 1024, 4095]
        connected(receivers).deliver([Parcel(1, index, nbytes, 100 + index) for index, nbytes in enumerate(sizes)])

    def test_buckets_come_once_and_in_order(self, connected: ConnectionMaker) -> None:
        """No bucket is dropped, doubled or swapped. All have one size, so that a size check cannot distinguish them."""
        connected(2).deliver([Parcel(1, index, 5000, 200 + index) for index in range(12)])

    def test_buckets_of_odd_sizes_arrive_to_their_last_byte(self, connected: ConnectionMaker) -> None:
        """A size need not be a multiple of anything."""
        sizes = [1, 2, 3, 5, 7, 13, 63, 65, 127, 4095, 4097, 65_537, 1_000_003]
        connected(2).deliver([Parcel(1, index, nbytes, 300 + index) for index, nbytes in enumerate(sizes)])

    def test_buckets_of_no_bytes_arrive(self, connected: ConnectionMaker) -> None:
        """A bucket may be empty, whether it is the first, the last, the only one or between others."""
        connection = connected(2)
        connection.deliver([Parcel(1, index, nbytes, index) for index, nbytes in enumerate([0, 10, 0, 0, 10, 0])])
        connection.deliver([Parcel(2, 0, 0, 0)])

    def test_a_bucket_larger_than_any_socket_buffer_arrives_whole(self, connected: ConnectionMaker) -> None:
        """The bucket does not fit into the buffers between the halves, so both have to work at the same time."""
        connected(2).deliver([Parcel(1, 0, LARGE + 1, 1)])

    def test_versions_follow_each_other_back_to_back(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """Versions of the same shape follow each other over one connection, and each has its own bytes."""
        connection = connected(2)
        versions = [
            [Parcel(version, index, 100_001, 10 * version + index) for index in range(3)] for version in (1, 2, 3, 7)
        ]
        if waits_for_receivers(capabilities):
            connection.deliver([parcel for version in versions for parcel in version])
        else:  # a store may forget old versions, so each is read before the next
            for version in versions:
                connection.deliver(version)

    def test_memory_may_be_overwritten_as_soon_as_send_returns(self, connected: ConnectionMaker) -> None:
        """The sender overwrites its buffer at once, while its receivers are slow."""
        connection = connected(2)
        connection.deliver([Parcel(1, index, 200_000, 400 + index) for index in range(3)], pause_s=_LATE_S)
        connection.deliver([Parcel(2, 0, 4 * MIB, 1)], pause_s=_LATE_S, allocated=False)

    @pytest.mark.parametrize("at_once", [2, MOST_POSTED])
    def test_several_buckets_are_under_way_at_a_time(self, connected: ConnectionMaker, at_once: int) -> None:
        """Buckets are posted before earlier ones are sent, and each one's memory is overwritten once it is reported as sent."""
        sizes = [100_001, 0, 3 * MIB, 17, 65_537, 1, 2 * MIB + 1, 5, 5, 5, 300_000]
        parcels = [Parcel(1, index, nbytes, 900 + index) for index, nbytes in enumerate([*sizes, *sizes])]
        connected(3).deliver(parcels, at_once=at_once)

    def test_a_slow_receiver_gets_every_bucket(self, connected: ConnectionMaker) -> None:
        """One receiver pauses before each bucket, the other does not. Both get every bucket."""
        connection = connected(2)
        slow, fast = connection.receivers
        parcels = [Parcel(1, index, 50_000, 500 + index) for index in range(8)]
        connection.start_receive(slow, parcels, pause_s=0.06)
        connection.start_receive(fast, parcels)
        connection.start_send(parcels)
        connection.check_received(connection.receivers, connection.sender)

    def test_memory_of_the_callers_own_is_delivered_too(self, connected: ConnectionMaker) -> None:
        """Memory of a bucket need not come from ``allocate``, and buckets may grow."""
        connection = connected(2)
        for version, nbytes in enumerate((1000, 100_000, 2 * MIB + 3), 1):
            connection.deliver([Parcel(version, 0, nbytes, version)], allocated=False)

    def test_several_senders_reach_the_same_receivers(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """Two senders that are connected to both receivers send in turn."""
        connection = connected(2, senders=2)
        for version in (1, 2) if waits_for_receivers(capabilities) else (1,):
            for number, sender in enumerate(connection.senders):
                connection.deliver([Parcel(version, 0, 50_000, 10 * version + number)], sender=sender)

    def test_a_bucket_for_some_receivers_reaches_only_those(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """With point-to-point delivery, only the named receivers get a bucket."""
        if Delivery.POINT_TO_POINT not in capabilities.delivery:
            pytest.skip("the engine does not declare point-to-point delivery")
        connection = connected(3)
        first, second, third = connection.receivers
        plan = [([first, third], 11), ([second], 12), ([first, second, third], 13), ([third], 14)]
        for half in connection.receivers:
            mine = [Parcel(1, index, 70_001, seed) for index, (targets, seed) in enumerate(plan) if half in targets]
            connection.start_receive(half, mine)
        everything = [Parcel(1, index, 70_001, seed) for index, (_, seed) in enumerate(plan)]
        for (targets, _), parcel in zip(plan, everything, strict=True):
            connection.start_send([parcel], to=targets, plan=everything, commit=parcel is everything[-1])
        failures = []
        for _ in plan:
            try:
                connection.sender.result()
            except WeightlaneError as error:
                failures.append(error)
        connection.check_received(connection.receivers)
        assert not failures, f"expected every send to succeed, it raised {type(failures[0]).__name__}: {failures[0]}"

    def test_a_bucket_for_some_receivers_is_refused_without_point_to_point(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """An engine that can only send to all receivers raises an error instead of sending to all, or to some."""
        if Delivery.POINT_TO_POINT in capabilities.delivery:
            pytest.skip("the engine declares point-to-point delivery")
        self.needs_waiting_sender(capabilities)
        connection = connected(2)
        connection.start_receive(connection.receivers[0], [Parcel(1, 0, 1000, 1)], deadline_s=self.expiring_s)
        connection.start_send([Parcel(1, 0, 1000, 1)], to=connection.receivers[:1])
        self.failure(connection.sender, ProtocolError, between_s=(0.0, self.prompt_s))
        self.failure(connection.receivers[0], WeightlaneError)

    def test_sending_to_somebody_unknown_is_refused(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """A name that is not in the topology is an error rather than a send to nobody."""
        self.needs_waiting_sender(capabilities)
        connection = connected(1)
        connection.sender.start("send", parcels=[Parcel(1, 0, 4, 1)], receivers=["nobody"], deadline_s=self.deadline_s)
        self.failure(connection.sender, ProtocolError, names="nobody", between_s=(0.0, self.prompt_s))

    @pytest.mark.parametrize(
        "wanted",
        [Parcel(1, 1, 4096, 1), Parcel(2, 0, 4096, 1), Parcel(1, 0, 4097, 1)],
        ids=["index", "version", "size"],
    )
    def test_a_bucket_other_than_the_one_asked_for_is_refused(
        self, connected: ConnectionMaker, capabilities: Capabilities, wanted: Parcel
    ) -> None:
        """A receiver that waits for another bucket never gets this one."""
        connection = connected(1)
        (receiver,) = connection.receivers
        connection.start_send([Parcel(1, 0, 4096, 1)], deadline_s=self.deadline_s)
        if not waits_for_receivers(capabilities):
            connection.sender.result()
            connection.start_receive(receiver, [wanted], deadline_s=self.expiring_s)
            self.failure(receiver, ProtocolError, DeadlineExceededError, between_s=self.in_time(self.expiring_s))
            return
        connection.start_receive(receiver, [wanted], deadline_s=self.deadline_s)
        self.failure(receiver, ProtocolError, names=connection.sender.name, between_s=(0.0, self.prompt_s))
        try:  # a small bucket may be sent before the refusal arrives, which then fails the next send
            connection.sender.result()
        except (ProtocolError, PeerLostError):
            return
        receiver.call("close")
        connection.start_send([Parcel(1, 1, LARGE, 1)], deadline_s=self.deadline_s)
        self.failure(connection.sender, ProtocolError, PeerLostError, between_s=(0.0, self.prompt_s))

    def test_what_was_sent_arrives_though_the_sender_closes_right_after(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """A bucket cannot be lost once ``send`` has returned."""
        if not waits_for_receivers(capabilities) and not capabilities.persistent:
            pytest.skip("the buckets of a store that is not persistent end with their sender")
        connection = connected(2)
        parcel = Parcel(1, 0, 3 * MIB, 1)
        for half in connection.receivers:
            connection.start_receive(half, [parcel])
        connection.start_send([parcel])
        connection.sender.start("close")
        connection.check_received(connection.receivers, connection.sender)
        connection.sender.result()
