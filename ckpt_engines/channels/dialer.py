"""A receiver's side of the handshake: connect to a sender and join its session."""

from __future__ import annotations

import errno
import select
import socket
from typing import Any

from ..deadline import Deadline
from ..errors import PeerLostError, ProtocolError, TransportError
from ..runtime.lifecycle import Lifecycle
from .channel import Channel
from .handshake import ReceiverHello
from .local_socket import SHARED_DIRECTORY_HINT

_BACKLOG_PAUSE_S = 0.01
"""How long to wait before connecting again to a Unix socket whose backlog is full: the kernel gives no event for room in it."""
_ADDRESS_HINT = "Check that the sender is alive and that the address can be reached from here."
_SOCKET_HINT = f"Check that the sender is alive. {SHARED_DIRECTORY_HINT}"


def dial(
    address: tuple[str, int] | str,
    life: Lifecycle,
    deadline: Deadline,
    *,
    session: str,
    name: str,
    peer: str,
    lane: str = "",
    key: bytes = b"",
) -> Channel:
    """Connect to a sender and have it admit this receiver. `welcomed` then waits for the other receivers.

    Args:
        address: Host and port, or the path of a Unix socket.
        life: Lifecycle of this receiver; closing it ends the waits.
        deadline: By when the sender has to admit this receiver.
        session: See `Topology.session`.
        name: Name of this receiver in the topology.
        peer: Name of the sender, for error messages.
        lane: Tells several connections to one sender apart.
        key: See `Topology.key`; both sides prove that they know it.

    Raises:
        PeerLostError: Nothing listens at the address, or the sender is gone.
        ProtocolError: The sender refuses this receiver, or does not prove that it knows the key.
        TransportError: The host's name cannot be resolved.
        DeadlineExceededError: The sender did not answer in time.
        ClosedError: `life` was closed.
    """
    target: Any = address
    family = socket.AF_UNIX
    if not isinstance(address, str):
        try:
            family, _, _, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        except (OSError, ValueError) as error:  # ValueError: a text that cannot be a host's name
            raise TransportError(f"cannot resolve {address[0]!r}: {error}.", part=life.part, peer=peer) from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _connect(sock, target, life, peer, deadline)
        channel = Channel(sock, life, peer)
        _say_hello(channel, ReceiverHello.of(session, name, lane, key), key, deadline)
    except BaseException:
        sock.close()
        raise
    return channel


def welcomed(channel: Channel, deadline: Deadline) -> None:
    """Wait until the sender has admitted every receiver of the topology. Raises as `dial`."""
    _answer(channel, deadline, "the sender's welcome, which needs every receiver")


def _say_hello(channel: Channel, hello: ReceiverHello, key: bytes, deadline: Deadline) -> None:
    channel.send_json(hello.message(key), deadline)
    if key and not hello.admitted_by(_answer(channel, deadline, "the sender to admit it"), key):
        raise ProtocolError(
            "the listener at the sender's address does not know this session's key.",
            part=channel.part,
            peer=channel.peer,
            hint="Another program may have taken the sender's address; see docs/security.md.",
        )


def _answer(channel: Channel, deadline: Deadline, waiting_for: str) -> dict[str, Any]:
    """Return the sender's next message, or raise `ProtocolError` when it is a refusal."""
    message = channel.receive_json(deadline, waiting_for)
    if "refused" in message:
        raise ProtocolError(f"the sender refused: {message['refused']}.", part=channel.part, peer=channel.peer)
    return message


def _connect(sock: socket.socket, target: Any, life: Lifecycle, peer: str, deadline: Deadline) -> None:
    sock.setblocking(False)
    while (code := sock.connect_ex(target)) == errno.EAGAIN:  # a Unix socket whose backlog is full
        life.wait({}, min(_BACKLOG_PAUSE_S, deadline.remaining_s))
        deadline.check("the sender to accept the connection", part=life.part, peer=peer)
    if code == errno.EINPROGRESS:
        life.wait_until({sock.fileno(): select.POLLOUT}, deadline, "the connection to the sender", peer)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise PeerLostError(
            f"cannot connect to {target}: {errno.errorcode.get(code, code)}.",
            part=life.part,
            peer=peer,
            hint=_SOCKET_HINT if isinstance(target, str) else _ADDRESS_HINT,
        )
