"""`SocketFactory`: the sockets over which a sender and its receivers connect. Public in `toolkit`.

A Unix socket is in the directory that sender and receivers share from the sender's ``address`` to the end of its ``connect``. The
next sender that uses the directory removes the socket of one that was killed in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError, ProtocolError, StorageError, TransportError
from .channel import Address
from .listener import Listener, listen_tcp

_MAX_SOCKET_PATH_BYTES = 107
"""Linux's limit for the path of a Unix socket (``sun_path`` in unix(7), less the zero at its end)."""
SHARED_DIRECTORY_HINT = (
    "Containers need a directory that they share, with room for a socket: set checkpoint_engine.options.socket_dir to it. Trainer"
    " and rollout run as the same user."
)
"""Hint for containers: the default directory is shared memory, of which each container may have its own small one."""
_SOCKET_NAME = "weightlane-{}.sock"
_TOKEN_BYTES = 8
_SOCKET_PATTERN = re.compile(r"weightlane-[0-9a-f]{16}\.sock")
_STALE_PATTERN = _SOCKET_NAME.format("*")
_LOCK_WAIT_S = 1.0
"""How long to wait for the directory's lock. A holder needs microseconds, so a longer wait means that the holder is stopped."""
_LOCK_POLL_S = 0.002


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
    """Sender and receivers connect over TCP. A sender listens on `host`, an address of this machine, and on no other."""

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

    All of them see `directory`, in which the sender's socket has a name until all receivers have joined.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def listen(self, part: str) -> Listener:
        """Remove the sockets of dead senders, and listen on a Unix socket of mode 0600 under a new name.

        Raises `ConfigError` when the directory cannot be used and `StorageError` when it is full.
        """
        path = self._directory / _SOCKET_NAME.format(secrets.token_hex(_TOKEN_BYTES))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_stale_sockets(self._directory)
            with _locked(self._directory, fcntl.LOCK_SH):
                listener.bind(str(path))
                path.chmod(stat.S_IRUSR | stat.S_IWUSR)
                listener.listen(socket.SOMAXCONN)
        except OSError as error:
            listener.close()
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            if isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
                message = f"socket_dir {str(self._directory)!r}: {error.strerror}."
                raise ConfigError(message, part=part, hint=SHARED_DIRECTORY_HINT) from error
            message = f"cannot create a socket in {self._directory}: {error.strerror}."
            raise StorageError(message, part=part, hint=SHARED_DIRECTORY_HINT) from error
        return Listener(listener, {"socket": path.name, "host": host_identity()}, path)

    def target(self, address: Address, part: str, peer: str) -> str:
        """See `SocketFactory.target`."""
        if address.get("host") != host_identity():
            raise TransportError(
                "the peer runs on another host.",
                part=part,
                peer=peer,
                hint="Set checkpoint_engine.backend to one that crosses hosts, such as gloo or nccl.",
            )
        return str(self._directory / socket_name(address, part, peer))


def host_and_port(address: Address, part: str, peer: str) -> tuple[str, int]:
    """Return host and port of the address that `peer` gave. Raises `ProtocolError` when it holds anything else."""
    host, port = address.get("host"), address.get("port")
    if not (isinstance(host, str) and isinstance(port, int) and 0 < port < 2**16):
        raise ProtocolError(f"{dict(address)} is not an address with host and port.", part=part, peer=peer)
    return host, port


def socket_name(address: Address, part: str, peer: str) -> str:
    """Return the name of the sender's socket in its `address`. Raises `ProtocolError` when it could be any other path."""
    name = address.get("socket")
    if not (isinstance(name, str) and _SOCKET_PATTERN.fullmatch(name)):
        raise ProtocolError(f"{name!r} is not the name of a socket.", part=part, peer=peer)
    return name


def check_socket_directory(socket_dir: str) -> str:
    """Return `socket_dir`. Raises `ValueError` when the path of a socket in it would be too long."""
    length = len(os.fsencode(socket_dir)) + 1 + len(_SOCKET_NAME.format("")) + 2 * _TOKEN_BYTES
    if length > _MAX_SOCKET_PATH_BYTES:
        limit = _MAX_SOCKET_PATH_BYTES - length + len(os.fsencode(socket_dir))
        raise ValueError(f"is too long for the path of a Unix socket; at most {limit} bytes")
    return socket_dir


def host_identity() -> str:
    """Return an identity that all processes under one kernel share, containers included: they can pass descriptors."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _remove_stale_sockets(socket_dir: Path) -> None:
    """Remove the sockets of senders that were killed before their receivers connected.

    Such a socket refuses connections. So does a socket that is being made; the directory's lock protects it. Its maker holds the
    lock, and the kernel drops the lock when the maker is killed.
    """
    if not any(socket_dir.glob(_STALE_PATTERN)):
        return
    with _locked(socket_dir, fcntl.LOCK_EX) as granted:
        for path in socket_dir.glob(_STALE_PATTERN) if granted else ():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
                probe.setblocking(False)
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()


@contextlib.contextmanager
def _locked(socket_dir: Path, mode: int) -> Iterator[bool]:
    """Hold a lock on the directory itself, and yield whether it was granted within `_LOCK_WAIT_S`.

    Without the lock a sender still makes its socket, but removes none: the next sender can do that.
    """
    descriptor = os.open(socket_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        give_up_at = time.monotonic() + _LOCK_WAIT_S
        granted = False
        while not granted and time.monotonic() < give_up_at:
            try:
                fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
                granted = True
            except BlockingIOError:
                time.sleep(_LOCK_POLL_S)
        yield granted
    finally:
        os.close(descriptor)
