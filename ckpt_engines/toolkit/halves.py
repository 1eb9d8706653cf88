"""Bases of an engine's halves: a `Lifecycle`, channels to the peers, and the buckets that were posted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from ..channels.channel import Address, Channel
from ..contract.engine import Topology
from ..deadline import Deadline
from ..runtime.lifecycle import Lifecycle


class PostedCalls:
    """Calls that were posted and are made, in the same order, when the half is flushed."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[Deadline], None]] = deque()

    def post(self, call: Callable[[Deadline], None]) -> None:
        """Add `call`, which gets the deadline of the `flush` that makes it."""
        self._calls.append(call)

    def flush(self, deadline: Deadline, pending: int) -> None:
        """Make all calls except the last `pending`. Raises the errors of the calls."""
        while len(self._calls) > pending:
            self._calls.popleft()(deadline)


class ConnectedHalf:
    """Base of most halves: a `Lifecycle`, and the channels to the peers.

    Args:
        part: Name of the half for error messages, e.g. ``"nixl sender trainer-0"``.
    """

    def __init__(self, part: str) -> None:
        self._life = Lifecycle(part, self._release)
        self._channels: dict[str, Channel] = {}

    def address(self) -> Address:
        """Return an empty address: the framework connects both sides."""
        with self._life.call():
            return {}

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:  # noqa: ARG002
        """Store the channels. From now on, closing this half ends their waits."""
        with self._life.call():
            self._channels = dict(channels)
            for channel in self._channels.values():
                channel.belong_to(self._life)

    def close(self) -> None:
        """See `WeightSender.close`."""
        self._life.close()

    def _release(self) -> None:
        """Free the resources that a subclass has opened; see `Lifecycle`."""


class PostingHalf(ConnectedHalf):
    """A `ConnectedHalf` that keeps posted buckets until `flush` moves them, one after the other."""

    def __init__(self, part: str) -> None:
        super().__init__(part)
        self._posted = PostedCalls()

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Move the posted buckets, except the last `pending`."""
        with self._life.call():
            self._posted.flush(deadline, pending)
