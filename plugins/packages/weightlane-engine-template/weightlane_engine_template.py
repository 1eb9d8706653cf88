"""A checkpoint engine over plain TCP: one connection per receiver carries handshakes and payload. Copy, rename, fill in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from pydantic import Field

from weightlane.ckpt_engines import (
    API_VERSION,
    Address,
    Bucket,
    Capabilities,
    CheckpointEngine,
    Deadline,
    Delivery,
    EngineConfig,
    Mailbox,
    Topology,
    WeightReceiver,
    WeightSender,
    toolkit,
)


class TemplateConfig(EngineConfig):
    """Options of ``template``: what a user may write under ``checkpoint_engine.options``."""

    host: str = Field("127.0.0.1", description="Address of this machine on which a sender listens for receivers.")


class TemplateSender(WeightSender):
    """Listens, lets in the receivers of its topology, and sends each of them every bucket."""

    def __init__(self, name: str, config: TemplateConfig) -> None:
        self._life = toolkit.Lifecycle(f"template sender {name}", self._release)
        self._door = toolkit.Door(config.host, self._life)
        self._channels: dict[str, toolkit.Channel] = {}

    def address(self) -> Address:
        """Host and port."""
        with self._life.call():
            return self._door.address()

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:  # noqa: ARG002
        """Let every receiver in."""
        with self._life.call():
            self._channels = self._door.let_in(topology, deadline)

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        """Announce the bucket, move its bytes, and return once every receiver has them."""
        with self._life.call():
            channels = toolkit.choose(self._channels, receivers, self._life)
            toolkit.announce(channels, bucket, deadline)
            toolkit.send_payload(channels, bucket, deadline)  # your transport goes here
            toolkit.await_acknowledgements(channels, bucket, deadline)

    def close(self) -> None:
        """From any thread; `Lifecycle` calls `_release` when no call is running any more."""
        self._life.close()

    def _release(self) -> None:
        self._door.close()
        for channel in self._channels.values():
            channel.close()


class TemplateReceiver(WeightReceiver):
    """Dials every sender."""

    def __init__(self, name: str) -> None:
        self._life = toolkit.Lifecycle(f"template receiver {name}", self._release)
        self._name = name
        self._channels: dict[str, toolkit.Channel] = {}

    def address(self) -> Address:
        """Nothing: receivers dial."""
        return {}

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:  # noqa: ARG002
        """Dial every sender."""
        with self._life.call():
            self._channels = toolkit.dial_senders(topology, self._name, self._life, deadline)

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        """Wait for exactly this bucket, take its bytes, and say so."""
        with self._life.call():
            channel = toolkit.choose(self._channels, [sender], self._life)[sender]
            toolkit.expect(channel, bucket, deadline)
            toolkit.receive_payload(channel, bucket, deadline)  # and here
            toolkit.acknowledge(channel, bucket, deadline)

    def close(self) -> None:
        """From any thread; `Lifecycle` calls `_release` when no call is running any more."""
        self._life.close()

    def _release(self) -> None:
        for channel in self._channels.values():
            channel.close()


class TemplateEngine(CheckpointEngine):
    """Static facts, options, and the two halves."""

    api_version = API_VERSION
    config_type = TemplateConfig
    capabilities = Capabilities(frozenset({"cpu"}), frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}))

    def make_sender(self, name: str) -> WeightSender:
        """A new sending half."""
        return TemplateSender(name, cast("TemplateConfig", self.config))

    def make_receiver(self, name: str) -> WeightReceiver:
        """A new receiving half."""
        return TemplateReceiver(name)
