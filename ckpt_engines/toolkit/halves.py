"""Bases of an engine's halves: a `Lifecycle`, channels to the peers, and the buckets that were posted.

`PairedEngine` is the base class for a plain transport, where each pair of halves has a connection of its own. An author writes
`PairedEngine.send` and `PairedEngine.receive`, which move one bucket within a deadline, and may override the other methods.
`flush` moves the buckets one after the other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar, get_args

import torch

from ..channels.channel import Address, Channel
from ..contract.bucket import Bucket
from ..contract.capabilities import Capabilities, Delivery
from ..contract.engine import (
    API_VERSION,
    CheckpointEngine,
    EngineConfig,
    Topology,
    WeightReceiver,
    WeightSender,
    engine_label,
)
from ..waits import Deadline, Lifecycle
from .bucket_messages import choose, receive_payload, send_payload


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
        self._posted: deque[Callable[[Deadline], None]] = deque()
        """Calls that move the posted buckets, in the order of the posts; each gets the deadline of the `flush` that makes it."""

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Move the posted buckets, except the last `pending`. Raises the errors of moving them."""
        with self._life.call():
            while len(self._posted) > pending:
                self._posted.popleft()(deadline)


C = TypeVar("C", bound=EngineConfig)


class PairedSender(PostingHalf, WeightSender):
    """A sending half whose `flush` moves each bucket by one call of `send`."""

    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
        """Add `bucket` to those that `flush` sends."""
        with self._life.call():
            channels = choose(self._channels, receivers, self._life)
            self._posted.append(lambda deadline: self.send(channels, bucket, deadline))

    @abstractmethod
    def send(self, channels: Mapping[str, Channel], bucket: Bucket, deadline: Deadline) -> None:
        """See `PairedEngine.send`."""


class PairedReceiver(PostingHalf, WeightReceiver):
    """A receiving half whose `flush` moves each bucket by one call of `receive`."""

    def post(self, bucket: Bucket, sender: str) -> None:
        """Add `bucket` to those that `flush` receives."""
        with self._life.call():
            channel = choose(self._channels, [sender], self._life)[sender]
            self._posted.append(lambda deadline: self.receive(channel, bucket, deadline))

    @abstractmethod
    def receive(self, channel: Channel, bucket: Bucket, deadline: Deadline) -> None:
        """See `PairedEngine.receive`."""


class PairedEngine(CheckpointEngine, Generic[C]):
    """Base of plain transports, with the type of the options in brackets: ``class TcpEngine(PairedEngine[TcpConfig])``.

    A call that is blocked in `Channel` ends when the half is closed. Wait for anything else with ``channel.life``, or by
    `toolkit.run_bounded` and `toolkit.poll_until`.
    """

    api_version = API_VERSION
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu"}), delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT})
    )
    config: C

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "config_type" in vars(cls):
            return
        for base in vars(cls).get("__orig_bases__", ()):
            for argument in get_args(base):
                if isinstance(argument, type) and issubclass(argument, EngineConfig):
                    cls.config_type = argument

    def connected(self, channel: Channel, deadline: Deadline) -> None:
        """Prepare a connected pair. Called on both sides before the first bucket; does nothing unless overridden."""

    def send(self, channels: Mapping[str, Channel], bucket: Bucket, deadline: Deadline) -> None:
        """Move `bucket` to the receivers at the other ends of `channels`. Return when the bucket's memory may be overwritten."""
        send_payload(channels, bucket, deadline)

    def receive(self, channel: Channel, bucket: Bucket, deadline: Deadline) -> None:
        """Fill ``bucket.data`` with the bytes that the sender's `send` moves. Return when all bytes have arrived."""
        receive_payload(channel, bucket, deadline)

    def make_sender(self, name: str, device: torch.device) -> WeightSender:  # noqa: ARG002
        """See `CheckpointEngine.make_sender`."""
        return _Sender(self, f"sender {name}")

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:  # noqa: ARG002
        """See `CheckpointEngine.make_receiver`."""
        return _Receiver(self, f"receiver {name}")


class _EngineHalf(PostingHalf):
    def __init__(self, engine: PairedEngine[Any], side: str) -> None:
        super().__init__(f"{engine_label(engine)} {side}")
        self._engine = engine

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:
        with self._life.call():
            super().connect(topology, channels, deadline)
            for channel in self._channels.values():
                self._engine.connected(channel, deadline)


class _Sender(_EngineHalf, PairedSender):
    def send(self, channels: Mapping[str, Channel], bucket: Bucket, deadline: Deadline) -> None:
        self._engine.send(channels, bucket, deadline)


class _Receiver(_EngineHalf, PairedReceiver):
    def receive(self, channel: Channel, bucket: Bucket, deadline: Deadline) -> None:
        self._engine.receive(channel, bucket, deadline)
