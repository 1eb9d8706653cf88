"""Examines a half's process from outside: finds its listening sockets, connects to them, and records their traffic."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

TCP_LISTEN = "0A"
_UNIX_LISTEN = "00010000"
_UNIX_STREAM = "0001"
_POLL_S = 0.005
_CONNECT_S = 0.2
"""Longest time, in seconds, that a stranger waits for a connection. A listener whose queue is full never answers."""
_FLOOD = 300
"""Number of connections in a flood: more than the queue of a listener holds."""
_CHUNK_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)
"""Value of `SO_LINGER` with which closing sends a reset instead of an orderly end."""
_PORT = re.compile(r"(?:(?<=:)|^)\d+$")
"""A port number in a text: all of it, or its part after the last colon."""


class ListeningSocket(NamedTuple):
    """A listening stream socket: TCP, or a Unix socket whose path is the host and whose port is 0."""

    host: str
    port: int

    @property
    def everywhere(self) -> bool:
        """Whether the socket listens on every interface of the machine."""
        return self.host in ("0.0.0.0", "::")  # noqa: S104 - looked for

    def dial(self) -> socket.socket:
        """Connect to the listener. Raises OSError."""
        if self.port:
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - looked for
            return socket.create_connection((host, self.port), timeout=_CONNECT_S)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_CONNECT_S)
            sock.connect(self.host.replace("@", "\0", 1) if self.host.startswith("@") else self.host)
        except BaseException:
            sock.close()
            raise
        return sock


def listeners(pid: int) -> set[ListeningSocket]:
    """Return every stream socket on which the process `pid`, which must be the same user's, listens."""
    inodes = {target.removeprefix("socket:[").removesuffix("]") for target in descriptor_targets(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        for fields in socket_rows(pid, table):
            if fields[3] == TCP_LISTEN and fields[9] in inodes:
                host, port = fields[1].split(":")
                found.add(ListeningSocket(_host(host), int(port, 16)))
    for fields in socket_rows(pid, "unix"):
        if fields[3:5] == [_UNIX_LISTEN, _UNIX_STREAM] and fields[6] in inodes and len(fields) > 7:  # noqa: PLR2004
            found.add(ListeningSocket(fields[7], 0))
    return found


def descriptor_targets(pid: int | str) -> list[str]:
    """Return the targets of all open descriptors of the process `pid`, such as ``socket:[INODE]``."""
    targets = []
    for descriptor in list(Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(OSError):  # closed meanwhile, such as the descriptor of the listing itself
            targets.append(str(descriptor.readlink()))
    return targets


def socket_rows(pid: int | str, table: str) -> Iterable[list[str]]:
    """Return the columns of each row in a table of ``/proc/PID/net``; none where the table does not exist."""
    try:
        text = Path(f"/proc/{pid}/net/{table}").read_text(encoding="utf-8", errors="replace")
    except OSError:  # there is no IPv6
        return []
    return (line.split() for line in text.splitlines()[1:])


def _host(digits: str) -> str:
    """Return the address that the kernel prints as `digits`: 32-bit words in this machine's byte order."""
    words = [int(digits[place : place + 8], 16) for place in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)


class Strangers:
    """Connect to every listening socket of some processes as soon as it appears, until the end of the block.

    Args:
        manner: ``silent``: strangers connect and send nothing. ``garbage``: they send random bytes, or an HTTP request.
            ``hanging up``: they close in the middle of a message. ``flood``: a few hundred silent ones connect at once.
        pids: Ids of the processes.
    """

    def __init__(self, manner: str, pids: Iterable[int]) -> None:
        self._manner = manner
        self._pids = tuple(pids)
        self._connections: list[socket.socket] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._visit_all, daemon=True)
        self.visited: set[tuple[int, ListeningSocket]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for sock in self._connections:
            sock.close()

    def wait(self, at_most_s: float) -> None:
        """Wait until strangers have visited a first listener, for `at_most_s` seconds at most."""
        end = time.monotonic() + at_most_s
        while not self.visited and time.monotonic() < end:
            time.sleep(_POLL_S)

    def _visit_all(self) -> None:
        while not self._over.wait(_POLL_S):
            for pid in self._pids:
                with contextlib.suppress(OSError):  # the process has ended
                    for listener in listeners(pid):
                        if (pid, listener) not in self.visited:
                            self._visit(listener)
                            self.visited.add((pid, listener))

    def _visit(self, listener: ListeningSocket) -> None:
        for number in range(_FLOOD if self._manner == "flood" else 2):
            try:
                sock = listener.dial()
            except OSError:  # refused, which is allowed, or the queue is full
                return
            self._connections.append(sock)
            with contextlib.suppress(OSError):  # the listener has closed the connection
                if self._manner == "garbage":
                    sock.sendall(b"GET / HTTP/1.1\r\n\r\n" if number else random.Random(0).randbytes(4096))  # noqa: S311
                elif self._manner == "hanging up":
                    sock.sendall(b"\x10\0\0\0{"[: 5 * number])
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    sock.close()


class Recorder:
    """A TCP proxy in front of a listener of this machine that records both directions."""

    def __init__(self, target: ListeningSocket) -> None:
        self._target = target
        self._sockets: list[socket.socket] = []
        with target.dial() as probe:
            self._own = socket.create_server((probe.getpeername()[0], 0), family=probe.family)
        self.port: int = self._own.getsockname()[1]
        self.streams: list[bytearray] = []
        """The bytes of each direction of each connection."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close the proxy and every connection."""
        for sock in (self._own, *self._sockets):
            with contextlib.suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                ours, _ = self._own.accept()
                theirs = self._target.dial()
                theirs.settimeout(None)
                self._sockets += [ours, theirs]
                for source, sink in ((ours, theirs), (theirs, ours)):
                    stream = bytearray()
                    self.streams.append(stream)
                    threading.Thread(target=self._pump, args=(source, sink, stream), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, stream: bytearray) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                stream += chunk
                sink.sendall(chunk)
            sink.shutdown(socket.SHUT_WR)


def rerouted(address: Any, ports: Mapping[int, int]) -> Any:
    """Return plain data with every port number that is a key of `ports` replaced by its value, also after a colon in a string."""
    if isinstance(address, dict):
        return {key: rerouted(value, ports) for key, value in address.items()}
    if isinstance(address, list):
        return [rerouted(value, ports) for value in address]
    if isinstance(address, str):
        return _PORT.sub(lambda match: str(ports.get(int(match[0]), match[0])), address)
    return ports.get(address, address) if type(address) is int else address
