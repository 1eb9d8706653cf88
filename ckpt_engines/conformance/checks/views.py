"""Checks of engines whose receivers view buckets in the sender's memory: `Capabilities.views`."""

from __future__ import annotations

import time

import pytest

from ...contract.capabilities import Capabilities
from ...errors import ClosedError, PeerLostError, ProtocolError
from ..processes.connection import Connection
from ..processes.payload import Parcel
from .base import MIB, ConformanceBase, ConnectionMaker

_WARM_UP_ROUNDS = 3
"""Rounds after which the counts of resources must stay constant."""


def _version(number: int, *sizes: int) -> list[Parcel]:
    """Return a version of buckets of these sizes, by default of odd ones."""
    return [
        Parcel(number, index, nbytes, 10 * number + index) for index, nbytes in enumerate(sizes or (70_001, 3, 9000))
    ]


class ViewChecks(ConformanceBase):
    """Checks of lasting buckets and their views."""

    @pytest.fixture
    def viewers(self, connected: ConnectionMaker, capabilities: Capabilities) -> ConnectionMaker:
        """The fixture `connected`. Skips the check for engines that do not declare views."""
        if not capabilities.views:
            pytest.skip("the engine does not declare views")
        return connected

    @pytest.mark.parametrize("receivers", [1, 3])
    def test_a_viewed_bucket_shows_the_bytes_that_were_sent(self, viewers: ConnectionMaker, receivers: int) -> None:
        """One and three receivers view buckets at once, from an empty bucket to a large one."""
        connection = viewers(receivers)
        connection.show(_version(1, 3 * MIB + 1, 1, 0, 4095, 0, 64 * 1024))
        connection.release(1)

    def test_buckets_that_adjoin_are_viewed_as_one_storage(self, viewers: ConnectionMaker) -> None:
        """A tensor in several buckets can thus be read as one."""
        connection = viewers(2)
        version = _version(1, 100_001, 7, 1, MIB)
        connection.show(version)
        for half in connection.receivers:
            problem = half.call("join", parcels=version)
            assert not problem, f"expected one storage of the views of {half.name}, {problem}"

    def test_lasting_buckets_in_the_callers_own_memory_are_viewed_too(self, viewers: ConnectionMaker) -> None:
        """Memory of a bucket need not come from ``allocate``, and the next bucket does not replace it."""
        connection = viewers(2)
        version = _version(1, 5000, 5000, 5000)
        connection.show(version, own=True)
        connection.check_views(version)
        connection.release(1)

    def test_a_receiver_may_copy_what_others_view(self, viewers: ConnectionMaker) -> None:
        """A receiver that only received buckets of a version need not release it."""
        connection = viewers(3)
        viewing, copying, doing_both = connection.receivers
        version = _version(1)
        connection.start_view(viewing, version)
        connection.start_receive(copying, version)
        connection.start_receive(doing_both, version[:1])
        connection.start_view(doing_both, version[1:])
        connection.start_show(version)
        connection.check_received([*connection.receivers, connection.sender])
        connection.check_received([doing_both])
        for half in (viewing, doing_both):
            half.call("release", version=1, deadline_s=self.deadline_s)
        connection.sender.call("reclaim", version=1, deadline_s=self.deadline_s)

    def test_a_bucket_that_does_not_last_is_not_viewed(self, viewers: ConnectionMaker) -> None:
        """Both halves get an error, because the sender would overwrite the bucket."""
        connection = viewers(1)
        (receiver,) = connection.receivers
        connection.start_view(receiver, [Parcel(1, 0, 1000, 1)], deadline_s=self.deadline_s)
        connection.start_send([Parcel(1, 0, 1000, 1)], deadline_s=self.deadline_s)
        self.failure(receiver, ProtocolError, between_s=(0.0, self.prompt_s))
        self.failure(connection.sender, ProtocolError, PeerLostError, between_s=(0.0, self.prompt_s))

    def test_reclaim_waits_for_the_last_release(self, viewers: ConnectionMaker) -> None:
        """Reclaim does not return before the last release, and returns soon after it."""
        connection = viewers(2)
        first, last = connection.receivers
        connection.show(_version(1))
        first.call("release", version=1, deadline_s=self.deadline_s)
        connection.sender.start("reclaim", version=1, deadline_s=self.deadline_s)
        self.not_yet(connection.sender, 2 * self.settle_s, f"{last.name} released the version")
        last.call("release", version=1, deadline_s=self.deadline_s)
        connection.sender.result()
        seconds = connection.sender.seconds
        within_s = 2 * self.settle_s + self.prompt_s
        assert seconds <= within_s, f"expected reclaim to return within {within_s:g} s, it took {seconds:.2f} s"

    def test_releases_and_acknowledgements_of_two_versions_may_cross(self, viewers: ConnectionMaker) -> None:
        """One version is released while the other is sent. Each is reclaimed separately, in any order."""
        connection = viewers(1)
        (receiver,) = connection.receivers
        first, second, third = (_version(number) for number in (1, 2, 3))
        connection.show(first)
        connection.start_view(receiver, second[:1])
        receiver.start("release", version=1, deadline_s=self.deadline_s)
        connection.start_view(receiver, second[1:])
        connection.start_show(second, slot=1)
        for _ in range(3):
            receiver.result()
        connection.sender.result()
        connection.sender.call("reclaim", version=1, deadline_s=self.deadline_s)
        connection.show(third)
        receiver.call("release", version=3, deadline_s=self.deadline_s)
        connection.sender.call("reclaim", version=3, deadline_s=self.deadline_s)
        connection.sender.start("reclaim", version=2, deadline_s=self.expiring_s)
        self.expires(connection.sender, receiver)
        connection.check_views(second)
        connection.release(2)

    def test_memory_is_used_again_once_it_is_reclaimed(self, viewers: ConnectionMaker) -> None:
        """The next version of the same shape uses the same memory, and its views show its own bytes."""
        connection = viewers(2)
        for number in (1, 2, 3):
            connection.show(_version(number))
            connection.check_views(_version(number))
            connection.release(number)

    def test_memory_outlives_a_connection(self, viewers: ConnectionMaker) -> None:
        """The memory belongs to the engine. The next sender can send its bytes unchanged, and they are viewed as one storage."""
        connection = viewers(1)
        version = _version(1)
        connection.show(version)
        for half in connection.halves:
            half.call("close", keep=True)
        connection.make()
        connection.connect().show(version, fill=False)
        problem = connection.receivers[0].call("join", parcels=version)
        assert not problem, f"expected one storage of the memory of the previous sender, {problem}"
        connection.release(1)

    def test_what_is_viewed_stays_when_its_memory_is_freed(self, viewers: ConnectionMaker) -> None:
        """The sender frees the memory and uses other memory. A receiver that still views it sees the old bytes."""
        connection = viewers(1)
        first, second = _version(1), _version(2)
        connection.show(first)
        connection.sender.call("free_shown")
        connection.show(second)
        connection.check_views(first)
        connection.check_views(second)

    def test_a_view_outlives_both_halves(self, viewers: ConnectionMaker) -> None:
        """A view stays readable after close, and after the sender's process was killed."""
        connection = viewers(1)
        (receiver,) = connection.receivers
        version = _version(1, 2 * MIB, 1)
        connection.show(version)
        receiver.call("close", keep=True)
        connection.check_views(version)
        connection.sender.kill()
        connection.check_views(version)

    @pytest.mark.parametrize("when", ["before", "meanwhile"])
    def test_reclaim_fails_in_time_when_a_receiver_was_killed(self, viewers: ConnectionMaker, when: str) -> None:
        """Reclaim raises `PeerLostError` long before its deadline, since a dead receiver never releases."""
        connection = viewers(2)
        alive, doomed = connection.receivers
        connection.show(_version(1))
        alive.call("release", version=1, deadline_s=self.deadline_s)
        if when == "before":
            doomed.kill()
        connection.sender.start("reclaim", version=1, deadline_s=self.deadline_s)
        if when == "meanwhile":
            time.sleep(self.settle_s)
            doomed.kill()
        self.failure(connection.sender, PeerLostError, names=doomed.name, between_s=(0.0, self.prompt_s))

    def test_reclaim_ends_by_its_deadline_when_a_receiver_does_not_release(self, viewers: ConnectionMaker) -> None:
        """The error names the receiver."""
        connection = viewers(2)
        released, looking = connection.receivers
        connection.show(_version(1))
        released.call("release", version=1, deadline_s=self.deadline_s)
        connection.sender.start("reclaim", version=1, deadline_s=self.expiring_s)
        self.expires(connection.sender, looking)

    @pytest.mark.parametrize("call", ["reclaim", "view"])
    def test_close_from_another_thread_ends_a_blocked_reclaim_or_view(
        self, viewers: ConnectionMaker, call: str
    ) -> None:
        """The call raises `ClosedError` soon, and so does every later call."""
        connection = viewers(1)
        connection.show(_version(1))
        half = connection.sender if call == "reclaim" else connection.receivers[0]
        half.call("close_after", seconds=self.settle_s)
        for latest_s in (self.settle_s + self.slack_s, self.slack_s):
            if call == "reclaim":
                half.start("reclaim", version=1, deadline_s=self.deadline_s)
            else:
                connection.start_view(half, _version(2))
            self.failure(half, ClosedError, between_s=(0.0, latest_s))

    def test_many_versions_that_were_viewed_leave_nothing_behind(self, viewers: ConnectionMaker) -> None:
        """The count of descriptors and mappings stays constant once memory is freed and nothing is viewed."""
        connection = viewers(1)
        rounds = self.rounds + _WARM_UP_ROUNDS
        before: list[dict[str, int]] = []
        for number in range(1, rounds + 1):
            self._view_and_free(connection, _version(number, 5000, 10))
            if number == _WARM_UP_ROUNDS:
                before = [half.call("resources") for half in connection.halves]
        self.no_more_than(before, connection, f"after {rounds} versions")

    @staticmethod
    def _view_and_free(connection: Connection, version: list[Parcel]) -> None:
        connection.show(version)
        connection.release(version[0].version)
        connection.sender.call("free_shown")
