"""How a sender and its receivers meet over TCP: the sender's `Door` and the receiver's `dial_senders`. Public in `toolkit`."""

from __future__ import annotations

import socket

from ._channel import Channel, accept_receivers, dial, listen_tcp
from ._lifecycle import Lifecycle
from .contract import Address, Topology
from .deadline import Deadline
from .errors import ProtocolError


class Door:
    """A sender's listening TCP socket, from its `address` to the end of `let_in`.

    Args:
        host: Address of this machine to listen on; nobody is reachable there before `address` is called.
        life: Lifecycle of the half. Its release function must call `close`.
    """

    def __init__(self, host: str, life: Lifecycle) -> None:
        self._host = host
        self._life = life
        self._listener: socket.socket | None = None

    def address(self) -> Address:
        """Host and port for `dial_senders`; listens from here on. `ConfigError` when `host` is none of this machine."""
        return tcp_address(self._open())

    def let_in(self, topology: Topology, deadline: Deadline) -> dict[str, Channel]:
        """Wait for every receiver of `topology`, let nobody else in, welcome them all and close the door.

        Returns one channel per receiver, in the topology's order. Raises `PeerLostError` or `DeadlineExceededError`.
        """
        listener = self._open()
        channels = accept_receivers(
            listener, self._life, topology.session, topology.receivers, deadline, key=topology.key
        )
        self.close()
        for channel in channels.values():
            channel.send_json({}, deadline)
        return channels

    def close(self) -> None:
        """Listen no longer."""
        if self._listener is not None:
            self._listener.close()

    def _open(self) -> socket.socket:
        if self._listener is None:
            self._listener = listen_tcp(self._host)
        return self._listener


def dial_senders(topology: Topology, name: str, life: Lifecycle, deadline: Deadline) -> dict[str, Channel]:
    """Connect the receiver called `name` to the `Door` of every sender and wait for each one's welcome.

    Returns one channel per sender, in the topology's order. Raises `PeerLostError`, `ProtocolError` for an address that is
    none or when a sender refuses, or `DeadlineExceededError`.
    """
    channels: dict[str, Channel] = {}
    try:
        for sender, address in topology.senders.items():
            target = host_and_port(address, life.part, sender)
            channels[sender], _ = dial(
                target, life, deadline, session=topology.session, name=name, peer=sender, key=topology.key
            )
    except BaseException:
        for channel in channels.values():
            channel.close()
        raise
    return channels


def tcp_address(listener: socket.socket) -> Address:
    """Host and port of a `listen_tcp` socket, as an address that `host_and_port` reads on the other side."""
    host, port, *_ = listener.getsockname()
    return {"host": host, "port": port}


def host_and_port(address: Address, part: str, peer: str) -> tuple[str, int]:
    """Host and port out of a peer's address; `ProtocolError` when it is anything else."""
    host, port = address.get("host"), address.get("port")
    if not (isinstance(host, str) and isinstance(port, int) and 0 < port < 2**16):
        raise ProtocolError(f"{dict(address)} is not an address with host and port.", part=part, peer=peer)
    return host, port
