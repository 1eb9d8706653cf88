"""The handshake of a control connection: both ends prove that they know the run's secret, and derive keys from it.

Two fresh nonces, one of either end, make the keys of every connection different. The listener's nonce also says after how many
seconds of silence a host counts as gone.

The kernel watches the other end: it sends keep-alive probes while the connection is idle, and limits how long sent bytes may stay
unacknowledged. A host that vanishes therefore ends the connection after `silence_s` seconds. A process that is only busy does
not, unless it reads nothing for so long while more waits for it than its socket holds.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass

from weightlane.ckpt_engines import Deadline, PeerLostError, ProtocolError, TransportError, WeightlaneError
from weightlane.ckpt_engines.channels.mac import TAG_BYTES, derive_key, proof, proves

from .frames import COORDINATOR, PART

_NONCE_BYTES = 16
_GREETING, _FULL = b"WLC1", b"WLC0"
"""The first bytes that a listener sends: it speaks this protocol, or it cannot serve one more connection."""
_SILENCE_DIGITS = 8
_HEX = frozenset("0123456789abcdef")
GREETING_BYTES = len(_GREETING) + 2 * _NONCE_BYTES + _SILENCE_DIGITS
ANSWER_BYTES = 2 * _NONCE_BYTES + 2 * TAG_BYTES
_WELCOME_BYTES = 2 * TAG_BYTES
_LEAST_TIMEOUT_S = 0.001
"""A socket timeout of 0 would mean that the socket does not block."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that sign what one end of a connection sends, and what it receives."""

    sending: bytes
    receiving: bytes


def greeting(silence_s: float) -> tuple[str, bytes]:
    """[listener] A fresh nonce, which ends with `silence_s`, and the bytes to send."""
    nonce = f"{secrets.token_hex(_NONCE_BYTES)}{int(1000 * silence_s):0{_SILENCE_DIGITS}x}"
    return nonce, _GREETING + nonce.encode()


def refusal() -> bytes:
    """[listener] The bytes that tell a participant that the listener cannot serve one more connection."""
    return _FULL.ljust(GREETING_BYTES, b"-")


def admit(secret: str, nonce: str, answer: bytes) -> tuple[Keys, bytes] | None:
    """[listener] The connection's keys and the bytes to send; None unless `answer` proves that its sender knows the secret."""
    theirs, claim = answer[: 2 * _NONCE_BYTES], answer[2 * _NONCE_BYTES :]
    shared = derive_key(secret, f"control/{nonce}/{theirs.decode(errors='replace')}")
    if not proves(shared, claim.decode(errors="replace"), "join"):
        return None
    return Keys(_directed(shared, "down"), _directed(shared, "up")), proof(shared, "welcome").encode()


def _directed(shared: bytes, direction: str) -> bytes:
    return bytes.fromhex(proof(shared, direction))


def dial(host: str, port: int, secret: str, deadline: Deadline) -> tuple[socket.socket, Keys]:
    """Connect to the listener of a run. Returns the configured socket and the connection's keys.

    Raises `PeerLostError` when nobody listens there, `ProtocolError` when the listener does not know the secret,
    `TransportError` when it cannot serve one more connection, or `DeadlineExceededError`.
    """
    where = f"{host}:{port}"
    try:
        sock = socket.create_connection((host, port), timeout=max(_LEAST_TIMEOUT_S, deadline.remaining_s))
        try:
            return sock, _introduce(sock, where, secret, deadline)
        except BaseException:
            sock.close()
            raise
    except WeightlaneError:
        raise
    except TimeoutError:
        raise deadline.error(f"a connection to {where}", part=PART, peer=COORDINATOR) from None
    except OSError as error:
        raise PeerLostError(
            f"cannot connect to {where}: {error}.",
            part=PART,
            peer=COORDINATOR,
            hint="Check that the process that runs the coordinator is alive, and that the address can be reached from here.",
        ) from error


def _introduce(sock: socket.socket, where: str, secret: str, deadline: Deadline) -> Keys:
    greeted = _receive(sock, GREETING_BYTES, deadline)
    if greeted.startswith(_FULL):
        raise TransportError(
            f"the coordinator at {where} has no file descriptor left for one more participant.",
            part=PART,
            peer=COORDINATOR,
            hint="Raise the limit of open files (ulimit -n) of the process that runs the coordinator.",
        )
    unknown = ProtocolError(
        f"the program that listens at {where} does not know this run's secret.",
        part=PART,
        peer=COORDINATOR,
        hint="Another program has the coordinator's port, or the address is of another run.",
    )
    nonce, mine = greeted[len(_GREETING) :].decode(errors="replace"), secrets.token_hex(_NONCE_BYTES)
    if not greeted.startswith(_GREETING) or not _HEX.issuperset(nonce):
        raise unknown
    shared = derive_key(secret, f"control/{nonce}/{mine}")
    sock.sendall(mine.encode() + proof(shared, "join").encode())
    welcome = _receive(sock, _WELCOME_BYTES, deadline)
    if not proves(shared, welcome.decode(errors="replace"), "welcome"):
        raise unknown
    configure(sock, int(nonce[-_SILENCE_DIGITS:], 16) / 1000)
    return Keys(_directed(shared, "up"), _directed(shared, "down"))


def _receive(sock: socket.socket, nbytes: int, deadline: Deadline) -> bytes:
    data = b""
    while len(data) < nbytes:
        sock.settimeout(max(_LEAST_TIMEOUT_S, deadline.remaining_s))
        chunk = sock.recv(nbytes - len(data))
        if not chunk:
            raise PeerLostError(
                "the connection was closed during the handshake.",
                part=PART,
                peer=COORDINATOR,
                hint="The address may be of another run, or of another program.",
            )
        data += chunk
    return data


def configure(sock: socket.socket, silence_s: float) -> None:
    """Have the kernel send at once, and end the connection after the other host was silent for `silence_s` seconds."""
    sock.setblocking(False)
    probes = 3
    between_s = max(1, int(silence_s / (2 * probes)))
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence_s) - probes * between_s)),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silence_s)),
    ):
        sock.setsockopt(level, option, value)
