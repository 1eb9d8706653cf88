"""TCP ports for programs that cannot choose one themselves."""

from __future__ import annotations

import atexit
import socket

_held: list[socket.socket] = []


@atexit.register
def _close() -> None:
    for holder in _held:
        holder.close()


def free_port() -> int:
    """A port on loopback that this process keeps for who listens on it with SO_REUSEADDR, as servers do.

    It stays bound until this process ends: no outgoing connection, no other test and no test of another process gets it,
    however late the program comes that it is meant for.
    """
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held.append(holder)
    return int(holder.getsockname()[1])
