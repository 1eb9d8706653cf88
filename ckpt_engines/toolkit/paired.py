"""`PairedEngine`: a plain transport in a few lines, where each pair of halves has a connection of its own.

An author writes `PairedEngine.send` and `PairedEngine.receive`, which move one bucket within a deadline, and may override what
the rest of the class does. Everything else stands here: buckets are moved one after the other, when they are waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar, get_args

import torch

from ..channels.channel import Address, Channel
from ..contract.engine import (
    API_VERSION,
    Bucket,
    Capabilities,
    CheckpointEngine,
    Delivery,
    EngineConfig,
    Topology,
    WeightReceiver,
    WeightSender,
    engine_label,
)
from ..deadline import Deadline
from ..runtime.lifecycle import Lifecycle
from .bucket_messages import choose, receive_payload, send_payload

C = TypeVar("C", bound=EngineConfig)


class PostedCalls:
    """What was posted and is done, in that order, when somebody waits for it."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[Deadline], None]] = deque()

    def post(self, call: Callable[[Deadline], None]) -> None:
        """Have `call` done later, with the deadline of whoever waits for it then."""
        self._calls.append(call)

    def flush(self, deadline: Deadline, pending: int) -> None:
        """Do all but the last `pending`. Raises what they raise."""
        while len(self._calls) > pending:
            self._calls.popleft()(deadline)


class PairedEngine(CheckpointEngine, Generic[C]):
    """Base of plain transports; give the type of its options in brackets: ``class TcpEngine(PairedEngine[TcpConfig])``.

    A call that is blocked in `Channel` ends when the half is closed. Whoever waits for anything else does so with
    ``channel.life``, or by `toolkit.run_bounded` and `toolkit.poll_until`.
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
        """A pair is connected; called on both sides, before the first bucket."""

    def send(self, channels: Mapping[str, Channel], bucket: Bucket, deadline: Deadline) -> None:
        """Move `bucket` to every one of `channels`, and return when its memory may be overwritten."""
        send_payload(channels, bucket, deadline)

    def receive(self, channel: Channel, bucket: Bucket, deadline: Deadline) -> None:
        """Fill ``bucket.data`` with what the other side's `send` moves, and return when it is there."""
        receive_payload(channel, bucket, deadline)

    def make_sender(self, name: str, device: torch.device) -> WeightSender:  # noqa: ARG002
        """See `CheckpointEngine.make_sender`."""
        return _Sender(self, f"sender {name}")

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:  # noqa: ARG002
        """See `CheckpointEngine.make_receiver`."""
        return _Receiver(self, f"receiver {name}")


class _Half:
    def __init__(self, engine: PairedEngine[Any], what: str) -> None:
        self._engine = engine
        self._life = Lifecycle(f"{engine_label(engine)} {what}", lambda: None)
        self._channels: dict[str, Channel] = {}
        self._posted = PostedCalls()

    def address(self) -> Address:
        with self._life.call():
            return {}

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:  # noqa: ARG002
        with self._life.call():
            self._channels = dict(channels)
            for channel in self._channels.values():
                channel.belong_to(self._life)
                self._engine.connected(channel, deadline)

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        with self._life.call():
            self._posted.flush(deadline, pending)

    def close(self) -> None:
        self._life.close()


class _Sender(_Half, WeightSender):
    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
        with self._life.call():
            channels = choose(self._channels, receivers, self._life)
            self._posted.post(lambda deadline: self._engine.send(channels, bucket, deadline))


class _Receiver(_Half, WeightReceiver):
    def post(self, bucket: Bucket, sender: str) -> None:
        with self._life.call():
            channel = choose(self._channels, [sender], self._life)[sender]
            self._posted.post(lambda deadline: self._engine.receive(channel, bucket, deadline))
