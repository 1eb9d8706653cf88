"""`SocketFactory`: the sockets over which a sender and its receivers connect. Public in `toolkit`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from ..errors import ProtocolError
from .channel import Address
from .listener import Listener, listen_tcp
from .local_socket import check_same_host, host_identity, listen_local, socket_name


class SocketFactory(ABC):
    """Chooses the sockets over which the framework connects the halves of an engine."""

    @abstractmethod
    def listen(self, part: str) -> Listener:
        """[sender] Listen at any free port. Raises `ConfigError` or `StorageError`; `part` names the half in errors."""

    @abstractmethod
    def target(self, address: Address, part: str, peer: str) -> tuple[str, int] | str:
        """[receiver] Return where to connect, given the address of the sender `peer`: host and port, or a Unix socket's path.

        Raises `ProtocolError` when `address` is not an address, and `TransportError` when it cannot be reached from here.
        """


class TcpSocketFactory(SocketFactory):
    """Sender and receivers connect over TCP.

    Args:
        host: Address of this machine; a sender listens on no other.
    """

    def __init__(self, host: str) -> None:
        self._host = host

    def listen(self, part: str) -> Listener:  # noqa: ARG002
        """See `SocketFactory.listen`."""
        sock = listen_tcp(self._host)
        host, port, *_ = sock.getsockname()
        return Listener(sock, {"host": host, "port": port})

    def target(self, address: Address, part: str, peer: str) -> tuple[str, int]:
        """See `SocketFactory.target`."""
        return host_and_port(address, part, peer)


class LocalSocketFactory(SocketFactory):
    """Sender and receivers, processes of one host, connect over Unix sockets, which can pass file descriptors.

    Args:
        directory: Directory that all of them see. The sender's socket has a name there until all receivers have joined.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def listen(self, part: str) -> Listener:
        """See `SocketFactory.listen`."""
        sock, path = listen_local(self._directory, part)
        return Listener(sock, {"socket": path.name, "host": host_identity()}, path)

    def target(self, address: Address, part: str, peer: str) -> str:
        """See `SocketFactory.target`."""
        check_same_host(address, part, peer)
        return str(self._directory / socket_name(address, part, peer))


def host_and_port(address: Address, part: str, peer: str) -> tuple[str, int]:
    """Return host and port of the address that `peer` gave. Raises `ProtocolError` when it holds anything else."""
    host, port = address.get("host"), address.get("port")
    if not (isinstance(host, str) and isinstance(port, int) and 0 < port < 2**16):
        raise ProtocolError(f"{dict(address)} is not an address with host and port.", part=part, peer=peer)
    return host, port
