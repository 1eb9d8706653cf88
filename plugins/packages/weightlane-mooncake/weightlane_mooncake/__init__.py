"""A checkpoint engine over the Mooncake transfer engine: receivers read one-sidedly from the sender's registered memory.

Announcements and acknowledgements go over the framework's connections, which notice a death. Mooncake itself notices neither a
frozen peer nor a bucket that the receiver does not wait for.
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from pydantic import Field, field_validator

from weightlane.ckpt_engines import (
    Bucket,
    Capabilities,
    CheckpointEngine,
    Deadline,
    Delivery,
    EngineConfig,
    ProtocolError,
    Topology,
    WeightReceiver,
    WeightSender,
    toolkit,
)

from ._process_engine import Memory, ProcessEngine, check_devices, import_mooncake

__all__ = ["MooncakeConfig", "MooncakeEngine"]


class MooncakeConfig(EngineConfig):
    """Options of ``mooncake``."""

    host: str = Field("127.0.0.1", description="Address at which other machines reach this one.")
    protocol: Literal["tcp", "rdma"] = Field(
        "tcp", description="Mooncake's transport; rdma needs a device on this machine."
    )
    devices: str = Field("", description="RDMA devices, such as mlx5_0,mlx5_1; empty lets Mooncake choose.")

    @field_validator("host")
    @classmethod
    def _is_one_ipv4_address(cls, host: str) -> str:
        if ":" in host:
            raise ValueError(
                "is an IPv6 address, with which Mooncake's own names of peers are ambiguous; name one of IPv4"
            )
        return toolkit.one_address(host)


def _process_engine(config: MooncakeConfig) -> ProcessEngine:
    return ProcessEngine.of_this_process(config.host, config.protocol, config.devices)


class _Half(toolkit.PostingHalf):
    """Base of both halves."""

    def __init__(self, part: str, config: MooncakeConfig) -> None:
        super().__init__(part)
        self._config = config
        self._scratch: Memory | None = None

    def _scratch_for(self, nbytes: int) -> Memory:
        """Return registered memory for one bucket; larger memory replaces it as needed."""
        if self._scratch is None or self._scratch.data.numel() < nbytes:
            self._release()
            self._scratch = _process_engine(self._config).allocate(nbytes)
        return self._scratch

    def _release(self) -> None:
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.release()

    def connect(self, topology: Topology, channels: Mapping[str, toolkit.Channel], deadline: Deadline) -> None:
        """Start Mooncake's engine and take the channels. A receiver's first read connects to the sender."""
        with self._life.call():
            toolkit.run_bounded(partial(_process_engine, self._config), self._life, deadline, "Mooncake to start")
            super().connect(topology, channels, deadline)


class MooncakeSender(_Half, toolkit.PairedSender):
    """The sending half, which announces where a bucket is, and waits until every receiver has read it."""

    def __init__(self, part: str, config: MooncakeConfig, memory: toolkit.EngineMemory[Memory]) -> None:
        super().__init__(part, config)
        self._memory = memory

    def send(self, channels: Mapping[str, toolkit.Channel], bucket: Bucket, deadline: Deadline) -> None:
        """Announce the bucket and its place, and wait until all receivers have read it."""
        start = bucket.data.data_ptr()
        if bucket.nbytes and self._memory.find(bucket.data) is None:
            scratch = self._scratch_for(bucket.nbytes)
            scratch.data[: bucket.nbytes].copy_(bucket.data)
            start = scratch.start
        toolkit.announce(channels, bucket, deadline, segment=_process_engine(self._config).segment, start=start)
        toolkit.await_acknowledgements(channels, bucket, deadline)


class MooncakeReceiver(_Half, toolkit.PairedReceiver):
    """The receiving half, which reads each bucket into memory of the engine's own, and copies it into the bucket.

    A read that continues after a failed call therefore never reaches memory that is in use for something else.
    """

    def receive(self, channel: toolkit.Channel, bucket: Bucket, deadline: Deadline) -> None:
        """Wait for the announcement of the bucket, and read it."""
        announced = toolkit.expect(channel, bucket, deadline)
        if bucket.nbytes:
            segment, start = announced.get("segment"), announced.get("start")
            if not (isinstance(segment, str) and isinstance(start, int) and start > 0):
                raise ProtocolError(f"bad announcement: {announced}.", part=self._life.part, peer=channel.peer)
            engine, landing, nbytes = _process_engine(self._config), self._scratch_for(bucket.nbytes), bucket.nbytes
            toolkit.run_bounded(
                lambda: engine.read(segment, start, nbytes, landing),
                self._life,
                deadline,
                f"bucket {bucket.index} of version {bucket.version}",
                peer=channel.peer,
            )
            bucket.data.copy_(landing.data[:nbytes])
        toolkit.acknowledge(channel, bucket, deadline)


class MooncakeEngine(CheckpointEngine):
    """Engine for CPU memory over TCP, or over RDMA where the machines have it."""

    api_version = 2
    config: MooncakeConfig
    config_type = MooncakeConfig
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}),
    )

    def check(self, deadline: Deadline) -> None:  # noqa: ARG002 - it takes no time
        """Raise `ConfigError` when `protocol` is rdma and this machine has no such devices."""
        check_devices(self.config.protocol, self.config.devices)

    def socket_factory(self, name: str) -> toolkit.SocketFactory:  # noqa: ARG002
        """See `CheckpointEngine.socket_factory`."""
        return toolkit.TcpSocketFactory(self.config.host)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        if importlib.util.find_spec("mooncake") is None:
            return "mooncake-transfer-engine is not installed"
        try:
            import_mooncake()
        except (ImportError, OSError) as error:
            return f"mooncake cannot be imported: {error}"
        return None

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._memory: toolkit.EngineMemory[Memory] = toolkit.EngineMemory()
        weakref.finalize(self, _release_all, self._memory).atexit = False

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return registered memory, which senders send from without a copy."""
        if device.type != "cpu":
            raise ProtocolError(f"it sends from cpu memory only, not from {device.type}.", part="mooncake")
        memory = _process_engine(self.config).allocate(nbytes)
        return self._memory.add(memory.data, memory)[:nbytes]

    def free(self, memory: torch.Tensor) -> None:
        """See `CheckpointEngine.free`."""
        if registered := self._memory.discard(memory):
            registered.release()

    def make_sender(self, name: str, device: torch.device) -> WeightSender:  # noqa: ARG002
        """See `CheckpointEngine.make_sender`."""
        return MooncakeSender(f"mooncake sender {name}", self.config, self._memory)

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:  # noqa: ARG002
        """See `CheckpointEngine.make_receiver`."""
        return MooncakeReceiver(f"mooncake receiver {name}", self.config)


def _release_all(memory: toolkit.EngineMemory[Memory]) -> None:
    for registered in memory.drain():
        registered.release()
