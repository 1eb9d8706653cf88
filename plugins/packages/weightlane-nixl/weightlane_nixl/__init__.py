"""A checkpoint engine over NIXL with its UCX backend, which chooses RDMA, shared memory or TCP between two processes.

The sender writes buckets one-sidedly into registered memory of each receiver. Receivers do not read from the sender: UCX over TCP
ends the process (``ucp_request.inl: Fatal: unexpected error: Endpoint timeout``) when it serves a read of a peer that was killed
meanwhile, and a dead rollout worker must not end the trainer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial

import torch
from pydantic import Field

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

from ._agent import Agent, import_nixl

__all__ = ["NixlConfig", "NixlEngine"]


class NixlConfig(EngineConfig):
    """Options of ``nixl``."""

    host: str = Field("127.0.0.1", description="Address of this machine on which a sender listens for receivers.")
    net_devices: str = Field(
        "lo",
        description="Network devices on which UCX listens and sends (UCX_NET_DEVICES): mlx5_0:1 or eth0, for example; or all.",
    )
    transports: str = Field("all", description="Transports that UCX may use (UCX_TLS): rc,sm for example; or all.")


class _Half(toolkit.PostingHalf):
    """Base of both halves. Senders write to receivers' memory, so only a receiver has `_exposed` memory."""

    def __init__(self, part: str, config: NixlConfig) -> None:
        super().__init__(part)
        self._config = config
        self._agent: Agent | None = None
        self._exposed = False
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def connect(self, topology: Topology, channels: Mapping[str, toolkit.Channel], deadline: Deadline) -> None:
        """Open the agent and take the channels. UCX connects with the first bucket."""
        with self._life.call():
            make = partial(Agent, self._config.net_devices, self._config.transports, self._life.part)
            self._agent = toolkit.run_bounded(make, self._life, deadline, "UCX to start")
            super().connect(topology, channels, deadline)

    def _connected(self) -> Agent:
        if self._agent is None:
            raise ProtocolError("it is not connected.", part=self._life.part)
        return self._agent

    def _scratch_of(self, nbytes: int) -> torch.Tensor:
        """Return registered memory for one bucket. Earlier, smaller memory stays registered: peers may know its addresses."""
        if self._scratch.numel() < nbytes:
            self._scratch = self._connected().allocate(max(nbytes, 2 * self._scratch.numel()))
        return self._scratch[:nbytes]

    def _release(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8)
        if self._agent is not None:
            self._agent.close(exposed=self._exposed)


class NixlSender(_Half, toolkit.PairedSender):
    """The sending half, which writes into the receivers' memory."""

    def __init__(self, part: str, config: NixlConfig, memory: toolkit.EngineMemory[torch.Tensor]) -> None:
        super().__init__(part, config)
        self._memory = memory

    def send(self, channels: Mapping[str, toolkit.Channel], bucket: Bucket, deadline: Deadline) -> None:
        """Request from every receiver a place in its memory, write the bucket there, and announce that it is written."""
        agent = self._connected()
        source = bucket.data
        if bucket.nbytes:
            memory = self._memory.find(source)
            if memory is None:
                source = self._scratch_of(bucket.nbytes).copy_(source)
            else:  # registered once for this connection, with its first bucket
                agent.borrow(memory)
        toolkit.announce(channels, bucket, deadline)
        places = toolkit.await_acknowledgements(channels, bucket, deadline)
        if not bucket.nbytes or not channels:
            return
        writes = [agent.write(source, name, place) for name, place in places.items()]
        what = f"bucket {bucket.index} of version {bucket.version} to be written"

        def done() -> bool:
            states = [write.done() for write in writes]  # polls every write, so that all make progress
            return all(states)

        try:
            toolkit.poll_until(done, self._life, deadline, what, peer=", ".join(channels))
        finally:
            for write in writes:
                write.release()
        toolkit.announce(channels, bucket, deadline)
        toolkit.await_acknowledgements(channels, bucket, deadline)


class NixlReceiver(_Half, toolkit.PairedReceiver):
    """The receiving half, which offers memory for each bucket, and copies the bucket once the sender has written it there.

    The memory is the engine's own and not the framework's, so that a write that continues after a failed call never reaches
    memory that is in use for something else.
    """

    def receive(self, channel: toolkit.Channel, bucket: Bucket, deadline: Deadline) -> None:
        """Offer memory, wait until the sender has written there, and copy the bucket to its place."""
        toolkit.expect(channel, bucket, deadline)
        if not bucket.nbytes:
            toolkit.acknowledge(channel, bucket, deadline)
            return
        agent = self._connected()
        landing = self._scratch_of(bucket.nbytes)
        place = agent.place(landing)
        self._exposed = True
        toolkit.acknowledge(channel, bucket, deadline, **place)
        toolkit.expect(channel, bucket, deadline, progress=agent.progress)
        self._exposed = False
        bucket.data.copy_(landing)
        toolkit.acknowledge(channel, bucket, deadline)


class NixlEngine(CheckpointEngine):
    """Engine for CPU memory over shared memory on one host, and over RDMA or TCP between hosts, as UCX chooses."""

    api_version = 2
    config: NixlConfig
    config_type = NixlConfig
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}),
    )

    def socket_factory(self, name: str) -> toolkit.SocketFactory:  # noqa: ARG002
        """See `CheckpointEngine.socket_factory`."""
        return toolkit.TcpSocketFactory(self.config.host)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        if importlib.util.find_spec("nixl") is None:
            return "nixl is not installed"
        try:
            import_nixl()
        except (ImportError, OSError) as error:
            return f"nixl cannot be imported: {error}"
        return None

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._memory: toolkit.EngineMemory[torch.Tensor] = toolkit.EngineMemory()

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return memory that every sender registers once, and from which it sends without a copy."""
        memory = super().allocate(nbytes, device)
        return self._memory.add(memory, memory)

    def free(self, memory: torch.Tensor) -> None:
        """See `CheckpointEngine.free`. Senders that have registered the memory keep it until they close."""
        self._memory.discard(memory)

    def make_sender(self, name: str, device: torch.device) -> WeightSender:  # noqa: ARG002
        """See `CheckpointEngine.make_sender`."""
        return NixlSender(f"nixl sender {name}", self.config, self._memory)

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:  # noqa: ARG002
        """See `CheckpointEngine.make_receiver`."""
        return NixlReceiver(f"nixl receiver {name}", self.config)
