"""A checkpoint engine over plain TCP, with one connection for each pair. Replace the two marked lines by your transport."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from weightlane.ckpt_engines import Bucket, Channel, Deadline, EngineConfig, toolkit


class TemplateConfig(EngineConfig):
    """Options of ``template``, which users write under ``checkpoint_engine.options``."""

    host: str = Field("127.0.0.1", description="Address of this machine on which a sender listens for receivers.")


class TemplateEngine(toolkit.PairedEngine[TemplateConfig]):
    """CPU memory over plain TCP."""

    def socket_factory(self, name: str) -> toolkit.SocketFactory:  # noqa: ARG002
        """Return the sockets over which a sender and its receivers connect."""
        return toolkit.TcpSocketFactory(self.config.host)

    def send(self, channels: Mapping[str, Channel], bucket: Bucket, deadline: Deadline) -> None:
        """Move one bucket to its receivers; return when the bucket's memory may be overwritten."""
        toolkit.send_payload(channels, bucket, deadline)  # your transport goes here

    def receive(self, channel: Channel, bucket: Bucket, deadline: Deadline) -> None:
        """Fill the bucket with the bytes that the sender moves."""
        toolkit.receive_payload(channel, bucket, deadline)  # and here
