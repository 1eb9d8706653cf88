"""The two ends of a connection meet: the sender admits a session's receivers, which dial it and prove that they know the key."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from ..errors import DeadlineExceededError, PeerLostError, ProtocolError, TransportError
from ..runtime.threads import start_call
from ..waits import Deadline, Lifecycle, result_of
from .channel import LENGTH, Channel, Keys, decode_text
from .handshake import Agreement, Challenge, Hello, configure, encode_message, text_bytes
from .listener import Admission, Listener
from .socket_factory import SHARED_DIRECTORY_HINT

_MOST_PENDING = 128
"""Handshakes that may be pending at a time, in addition to one for each expected connection."""
_BACKLOG_PAUSE_S = 0.01
"""Seconds to wait before connecting again to a Unix socket whose backlog is full: the kernel gives no event when it has room."""
_ADDRESS_S = 5.0
"""Most seconds for one of several addresses of a host: a firewall may drop what is sent to an address of one family."""
_ADDRESS_HINT = "Check that the peer is alive and that its address can be reached from here."
_SOCKET_HINT = f"Check that the peer is alive. {SHARED_DIRECTORY_HINT}"


def accept_receivers(
    listener: Listener,
    life: Lifecycle,
    session: str,
    names: Iterable[str],
    deadline: Deadline,
    *,
    lanes: Sequence[str] = ("",),
    key: bytes = b"",
) -> list[dict[str, Channel]]:
    """[sender] Wait until every receiver in `names` has joined this `session` on each of `lanes`, and close the `listener`.

    All others are refused. Both sides prove that they know the `key` (`Topology.key`). Returns for each lane the channels in the
    order of `names`. Raises `PeerLostError` when a receiver that had connected is gone, `DeadlineExceededError` naming those that
    did not connect, or `ClosedError`.
    """
    names = tuple(names)
    wanted = [(lane, name) for lane in lanes for name in names]
    joined: dict[tuple[str, str], Channel] = {}
    given_up = False
    changing = threading.Lock()

    def refusal(hello: Hello, proven: bool) -> str:  # on the loop's thread, as `add`
        if hello.session != session:
            return "it waits for another session"
        if (hello.lane, hello.name) not in wanted:
            return "that is not the name of a receiver of this session"
        if not proven:
            return f"{hello.name} did not prove that it knows this session's key"
        return f"{hello.name!r} is connected already" if (hello.lane, hello.name) in joined else ""

    def add(sock: socket.socket, keys: Keys, hello: Hello) -> None:
        with changing:
            if given_up:
                sock.close()
            else:
                joined[hello.lane, hello.name] = Channel(sock, keys, life, hello.name)
        life.ring()

    listener.admit(Admission(key, refusal, add, _MOST_PENDING + len(wanted)))
    try:
        while missing := ", ".join(dict.fromkeys(name for lane, name in wanted if (lane, name) not in joined)):
            _wait(list(joined.values()), life, deadline, f"{missing} to connect")
            deadline.check(f"{missing} to connect", part=life.part, hint=listener.hint)
    except BaseException:
        with changing:
            given_up = True
        for channel in joined.values():
            channel.close()
        raise
    finally:
        listener.close()
    return [{name: joined[lane, name] for name in names} for lane in lanes]


def _wait(joined: Sequence[Channel], life: Lifecycle, deadline: Deadline, waiting_for: str) -> None:
    """Wait until another receiver may have joined. Raises `PeerLostError` when one of `joined` is gone."""
    channels = {channel.fileno(): channel for channel in joined}
    for descriptor in life.wait(dict.fromkeys(channels, select.POLLIN), deadline.remaining_s):
        # A receiver sends nothing before it is welcomed, so this is its end.
        raise channels[descriptor].lost(f"while waiting for {waiting_for}")


def welcome(channels: Iterable[Channel], deadline: Deadline) -> None:
    """[sender] Tell receivers that all of them have joined."""
    for channel in channels:
        channel.send_json({}, deadline)


def welcomed(channel: Channel, deadline: Deadline) -> None:
    """[receiver] Wait until the sender has admitted every receiver of the topology. Raises as `dial`."""
    channel.receive_json(deadline, "the sender's welcome, which needs every receiver")


def dial(
    address: tuple[str, int] | str, life: Lifecycle, deadline: Deadline, *, peer: str, key: bytes, hello: Hello
) -> Channel:
    """Connect to a listener, given its host and port or the path of its Unix socket, and have it admit this end as `hello` says.

    Both ends prove that they know `key`. Closing `life` ends the waits. `peer` is the other end's name for error messages.

    Raises:
        PeerLostError: Nothing listens at the address, or the peer is gone.
        ProtocolError: The peer refuses this end, or does not prove that it knows the key.
        TransportError: The host's name cannot be resolved, or the peer has no file descriptor left.
        DeadlineExceededError: The peer did not answer in time.
        ClosedError: `life` was closed.
    """
    targets: list[tuple[int, Any]] = [(socket.AF_UNIX, address)]
    if not isinstance(address, str):
        resolving = start_call(partial(socket.getaddrinfo, *address, type=socket.SOCK_STREAM))
        try:
            found = result_of(resolving, deadline, f"the address of {address[0]}", life.part)
        except DeadlineExceededError:  # which is an OSError
            raise
        except (OSError, ValueError) as error:  # ValueError: a text that cannot be a host's name
            raise TransportError(f"cannot resolve {address[0]!r}: {error}.", part=life.part, peer=peer) from error
        targets = [(family, target) for family, _, _, _, target in found]
    sock = _connected(targets, life, peer, deadline)
    try:
        return _agree(sock, life, peer, key, hello, deadline)
    except BaseException:
        sock.close()
        raise


def _agree(sock: socket.socket, life: Lifecycle, peer: str, key: bytes, hello: Hello, deadline: Deadline) -> Channel:
    bare = Channel(sock, Keys(b"", b""), life, peer)  # only its plain bytes are used
    challenge = Challenge.read(_message(bare, deadline))
    unknown = ProtocolError(
        f"the program that listens at the address of {peer} does not know this session's key.",
        part=life.part,
        peer=peer,
        hint="Another program may have taken the address, or it is of another run; see docs/security.md.",
    )
    if challenge is None:
        raise unknown
    agreement = Agreement.dialled(key, challenge, hello)
    bare.send(encode_message(agreement.message()), deadline)
    if not agreement.welcomed_by(_message(bare, deadline)):
        raise unknown
    configure(sock, challenge.silence_s)
    return Channel(sock, agreement.keys(listens=False), life, peer)


def _message(bare: Channel, deadline: Deadline) -> dict[str, Any]:
    """Return the listener's next message; empty if its bytes are no valid message.

    Raises `ProtocolError` when the listener refuses this end, or `TransportError` when it has no file descriptor left.
    """
    waiting_for = f"{bare.peer} to admit it"
    length = text_bytes(bare.receive(LENGTH.size, deadline, waiting_for))
    message = {} if length is None else decode_text(bare.receive(length, deadline, waiting_for)) or {}
    if "full" in message:
        raise TransportError(
            "the peer has no file descriptor left for one more connection.",
            part=bare.part,
            peer=bare.peer,
            hint="Raise the limit of open files (ulimit -n) of the peer's process.",
        )
    if "refused" in message:
        raise ProtocolError(f"the peer refused: {message['refused']}.", part=bare.part, peer=bare.peer)
    return message


def _connected(targets: list[tuple[int, Any]], life: Lifecycle, peer: str, deadline: Deadline) -> socket.socket:
    """Return a socket connected to the first of `targets`, each a family and an address, that answers."""
    *others, last = targets
    for number, target in enumerate(others):  # a host's name may have an address of each family
        share_s = deadline.remaining_s / (len(targets) - number)
        with contextlib.suppress(PeerLostError, DeadlineExceededError):
            return _open(*target, life, peer, deadline.within(min(share_s, _ADDRESS_S)))
    return _open(*last, life, peer, deadline)


def _open(family: int, target: Any, life: Lifecycle, peer: str, deadline: Deadline) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _connect(sock, target, life, peer, deadline)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(sock: socket.socket, target: Any, life: Lifecycle, peer: str, deadline: Deadline) -> None:
    sock.setblocking(False)
    while (code := sock.connect_ex(target)) == errno.EAGAIN:  # a Unix socket whose backlog is full
        life.wait({}, min(_BACKLOG_PAUSE_S, deadline.remaining_s))
        deadline.check("the peer to accept the connection", part=life.part, peer=peer)
    if code == errno.EINPROGRESS:
        life.wait_until({sock.fileno(): select.POLLOUT}, deadline, "the connection to the peer", peer)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise PeerLostError(
            f"cannot connect to {target}: {errno.errorcode.get(code, code)}.",
            part=life.part,
            peer=peer,
            hint=_SOCKET_HINT if isinstance(target, str) else _ADDRESS_HINT,
        )
