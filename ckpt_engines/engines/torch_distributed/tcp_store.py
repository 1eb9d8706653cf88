"""TCP stores of torch.distributed, in which the members of a process group meet: serving one, joining one, reserving a port."""

from __future__ import annotations

import socket

import torch.distributed as dist

from ...channels.listener import listen_tcp
from ...deadline import Deadline
from ...errors import ConfigError, PeerLostError
from ...runtime.lifecycle import Lifecycle
from .process_group import call_bounded, translated


def host_store(host: str, port: int = 0) -> tuple[dist.TCPStore, int]:
    """Return a TCPStore that this process serves on `host` only, and its port; port 0 takes a free one.

    ``TCPStore`` itself would listen on every interface, so it gets a socket that is bound already. Raises
    `AddressInUseError` or `ConfigError`.
    """
    listener = listen_tcp(host, port)
    port = listener.getsockname()[1]
    try:
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno())
    except BaseException:
        listener.close()
        raise
    listener.detach()  # the store owns the descriptor from here on
    return store, port


def reserve_port(host: str) -> socket.socket:
    """Return a bound socket that reserves a free port of `host`: a process that asks for any free port gets another one.

    The process that the port is meant for can listen there meanwhile, for example with `host_store`. Close the socket after that.
    Raises `ConfigError` when `host` is not an address of this machine.
    """
    reserved = None
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        reserved = socket.socket(family, socket.SOCK_STREAM)
        reserved.bind((host, 0))
    except OSError as error:
        if reserved is not None:
            reserved.close()
        raise ConfigError(
            f"cannot reserve a port of {host!r}: {error}.", part="listener", hint="Use an address of this machine."
        ) from error
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after the bind, which must find the port unused
    return reserved


def join_store(
    host: str, port: int, deadline: Deadline, peer: str = "", life: Lifecycle | None = None
) -> dist.TCPStore:
    """Return a client of the store at `host`:`port`. Its timeout is the deadline's remaining time.

    Raises `PeerLostError` when no process listens there, `DeadlineExceededError` when the store does not answer in time, or
    `ClosedError` when `life` is closed meanwhile.
    """
    waiting = life or Lifecycle("store", lambda: None)

    def join() -> dist.TCPStore:
        try:  # TCPStore itself would retry a refused connection, and log every attempt
            socket.create_connection((host, port), timeout=max(0.001, deadline.remaining_s)).close()
        except TimeoutError:
            raise deadline.error(f"a connection to {host}:{port}", part=waiting.part, peer=peer) from None
        except OSError as error:
            hint = "Check that its owner is alive."
            message = f"cannot connect to {host}:{port}: {error}."
            raise PeerLostError(message, part=waiting.part, peer=peer, hint=hint) from error
        with translated(waiting.part, deadline, f"the store at {host}:{port}", peer):
            return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=deadline.timedelta())

    try:  # TCPStore's first request has no timeout, so a stopped server process would block the caller for ever
        return call_bounded(join, waiting, deadline, f"an answer of the store at {host}:{port}", peer)
    finally:
        if life is None:
            waiting.close()
