"""A checkpoint engine over plain TCP, one connection for each pair. Put your transport in place of the two marked lines."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from weightlane.ckpt_engines import Bucket, Channel, Deadline, EngineConfig, toolkit


class TemplateConfig(EngineConfig):
    """Options of ``template``: what a user may write under ``checkpoint_engine.options``."""

    host: str = Field("127.0.0.1", description="Address of this machine on which a sender listens for receivers.")


class TemplateEngine(toolkit.PairedEngine[TemplateConfig]):
    """CPU memory over plain TCP."""

    def meeting(self, name: str) -> toolkit.Meeting:  # noqa: ARG002
        """Where a sender listens."""
        return toolkit.TcpMeeting(self.config.host)

    def send(self, channels: Mapping[str, Channel], bucket: Bucket, deadline: Deadline) -> None:
        """Move one bucket to some receivers; return when its memory may be overwritten."""
        toolkit.send_payload(channels, bucket, deadline)  # your transport goes here

    def receive(self, channel: Channel, bucket: Bucket, deadline: Deadline) -> None:
        """Fill the bucket with what the sender moves."""
        toolkit.receive_payload(channel, bucket, deadline)  # and here
