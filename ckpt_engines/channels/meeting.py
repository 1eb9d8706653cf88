"""Where a sender and its receivers meet: it listens there, they knock. Public in `toolkit`."""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from ..errors import ProtocolError
from .channel import Address, listen_tcp
from .local_socket import check_same_host, host_identity, listen_local, socket_name


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket, and where others find it."""

    socket: socket.socket
    address: Address
    path: Path | None = None
    """Of a Unix socket, the name that goes with it."""

    def close(self) -> None:
        """Listen no longer. Idempotent; never raises: a name that stays is removed by the next sender."""
        self.socket.close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


class Meeting(ABC):
    """Chooses the sockets over which the framework connects the halves of an engine."""

    @abstractmethod
    def listen(self, part: str) -> Listener:
        """[sender] Listen, at any free port. Raises `ConfigError` or `StorageError`; `part` names the half in errors."""

    @abstractmethod
    def target(self, address: Address, part: str, peer: str) -> tuple[str, int] | str:
        """[receiver] What to connect to, out of what `peer` says its address is: host and port, or the path of a Unix socket.

        Raises `ProtocolError` for an address that is none, or `TransportError` for one that cannot be reached from here.
        """


class TcpMeeting(Meeting):
    """Over TCP, at one address of this machine.

    Args:
        host: The address; a sender is reachable on no other.
    """

    def __init__(self, host: str) -> None:
        self._host = host

    def listen(self, part: str) -> Listener:  # noqa: ARG002
        """See `Meeting.listen`."""
        sock = listen_tcp(self._host)
        host, port, *_ = sock.getsockname()
        return Listener(sock, {"host": host, "port": port})

    def target(self, address: Address, part: str, peer: str) -> tuple[str, int]:
        """See `Meeting.target`."""
        return host_and_port(address, part, peer)


class LocalMeeting(Meeting):
    """Over Unix sockets, which can pass file descriptors, between processes of one host.

    Args:
        directory: Where the sender's socket has a name until all receivers have come. Everybody must see it.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def listen(self, part: str) -> Listener:
        """See `Meeting.listen`."""
        sock, path = listen_local(self._directory, part)
        return Listener(sock, {"socket": path.name, "host": host_identity()}, path)

    def target(self, address: Address, part: str, peer: str) -> str:
        """See `Meeting.target`."""
        check_same_host(address, part, peer)
        return str(self._directory / socket_name(address, part, peer))


def host_and_port(address: Address, part: str, peer: str) -> tuple[str, int]:
    """Host and port out of a peer's address; `ProtocolError` when it is anything else."""
    host, port = address.get("host"), address.get("port")
    if not (isinstance(host, str) and isinstance(port, int) and 0 < port < 2**16):
        raise ProtocolError(f"{dict(address)} is not an address with host and port.", part=part, peer=peer)
    return host, port
