"""Admission of a session's receivers by its sender, and the welcome once all of them have joined."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterable, Sequence

from ..waits import Deadline, Lifecycle
from .channel import Channel, Keys
from .handshake import Hello
from .listener import Admission, Listener

_MOST_PENDING = 128
"""Handshakes that may be pending at a time, in addition to one for each expected connection."""


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
