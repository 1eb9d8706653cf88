"""Transfer engines that read a registered memory of another process: NIXL and Mooncake."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .halves import Half, HalvesPeer, Receiver, Sender
from .peer import Needs, Peer, Through
from .workload import as_bytes


class _Agent(Half):
    def make_agent(self) -> Any:
        """A NIXL agent with this half's tensors registered, one descriptor per tensor."""
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent: Any = nixl_agent(f"agent-{self.rank}", nixl_agent_config(backends=["UCX"]))
        memory = [as_bytes(tensor) for tensor in self.tensors.values()]
        self._registered = self._agent.register_memory(memory)
        return self._agent.get_xfer_descs(memory)

    def close(self) -> None:
        if hasattr(self, "_registered"):
            self._agent.deregister_memory(self._registered)


class _NixlSender(_Agent, Sender):
    def prepare(self) -> None:
        descriptors = self.make_agent()
        self.link.tell_receivers((self._agent.get_agent_metadata(), self._agent.get_serialized_descs(descriptors)))
        for metadata in self.link.hear_receivers():
            self._agent.add_remote_agent(metadata)

    def send(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        self.link.signal_receivers()
        until = time.monotonic() + self.link.deadline_s
        missing = self.link.receivers
        while missing:
            missing -= sum(len(notes) for notes in self._agent.get_new_notifs().values())
            if time.monotonic() > until:
                raise TimeoutError(f"{missing} receivers have not read within {self.link.deadline_s:.0f} s")
            time.sleep(0.002)  # a sender that spins takes a core from the receivers


class _NixlReceiver(_Agent, Receiver):
    def prepare(self) -> None:
        metadata, descriptors = self.link.hear_sender(self.receiver)
        mine = self.make_agent()
        sender = self._agent.add_remote_agent(metadata)
        theirs = self._agent.deserialize_descs(descriptors)
        self.link.tell_sender(self.receiver, self._agent.get_agent_metadata())
        sender = sender.decode() if isinstance(sender, bytes) else sender
        self._read = self._agent.initialize_xfer("READ", mine, theirs, sender, b"read")

    def receive(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        self.link.await_sender(self.receiver)
        until = time.monotonic() + self.link.deadline_s
        state = self._agent.transfer(self._read)
        while state != "DONE":
            if state == "ERR" or time.monotonic() > until:
                raise RuntimeError(f"the transfer is in state {state}")
            state = self._agent.check_xfer_state(self._read)


class _Nixl(HalvesPeer):
    through: Through = "memory"
    packages = ("nixl", "nixl-cu12")
    sender = _NixlSender
    receiver = _NixlReceiver

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that restrict UCX to the peer's transports; none if UCX may pick one itself."""
        tls = self.options["tls"]
        return {"UCX_TLS": tls} if tls else {}

    def unavailable_reason(self) -> str | None:
        """Return why NIXL cannot be imported and how to install it, or None."""
        return Needs(("nixl._api",), "pip install --no-deps nixl nixl-cu12").missing()


class _Engine(Half):
    def make_engine(self) -> tuple[str, list[int]]:
        """Start a Mooncake engine with the tensors registered; returns its address and theirs."""
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("the Mooncake engine does not start")
        self._addresses = [tensor.data_ptr() for tensor in self.tensors.values()]
        self._sizes = [tensor.nbytes for tensor in self.tensors.values()]
        if self._engine.batch_register_memory(self._addresses, self._sizes) != 0:
            raise RuntimeError("the Mooncake engine does not register the tensors")
        return f"127.0.0.1:{self._engine.get_rpc_port()}", self._addresses


class _MooncakeSender(_Engine, Sender):
    def prepare(self) -> None:
        self.link.tell_receivers(self.make_engine())

    def send(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        self.link.signal_receivers()
        self.link.await_receivers()


class _MooncakeReceiver(_Engine, Receiver):
    def prepare(self) -> None:
        self._sender, self._theirs = self.link.hear_sender(self.receiver)
        self.make_engine()

    def receive(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        self.link.await_sender(self.receiver)
        read = self._engine.batch_transfer_sync_read(self._sender, self._addresses, self._theirs, self._sizes)
        if read != 0:
            raise RuntimeError(f"the read ended with {read}")
        self.link.signal_sender(self.receiver)


class _NixlTcp(_Nixl):
    through: Through = "network"


class _Mooncake(HalvesPeer):
    through: Through = "network"
    packages = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
    sender = _MooncakeSender
    receiver = _MooncakeReceiver

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that keep Mooncake from logging every transfer."""
        return {"GLOG_minloglevel": "2"}

    def unavailable_reason(self) -> str | None:
        """Return why Mooncake cannot be imported and how to install it, or None."""
        return Needs(
            ("mooncake.engine",), "pip install mooncake-transfer-engine-non-cuda, and libibverbs1 of the system"
        ).missing()


TRANSFERS: tuple[Peer, ...] = (
    _Nixl(
        "nixl", "READ into the receivers' tensors, UCX picks the transport (same host: one copy by the kernel)", tls=""
    ),
    _NixlTcp("nixl-tcp", "the same with UCX_TLS=tcp, as between machines without RDMA", tls="tcp"),
    _Mooncake("mooncake-tcp", "batch_transfer_sync_read into the receivers' tensors over TCP"),
)
