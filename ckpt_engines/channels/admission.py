"""Admission of a session's receivers by its sender, and the welcome once all of them have joined."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..deadline import Deadline
from ..runtime.lifecycle import Lifecycle
from .channel import Channel
from .connection import Keys
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
    joining = _Joining(life, session, tuple((lane, name) for lane in lanes for name in names))
    pending = _MOST_PENDING + len(joining.wanted)
    listener.admit(Admission(key, joining.refusal, joining.add, pending))
    try:
        while missing := ", ".join(joining.missing()):
            joining.wait(deadline, f"{missing} to connect", listener)
    except BaseException:
        joining.give_up()
        raise
    finally:
        listener.close()
    return [{name: joining.joined[lane, name] for name in names} for lane in lanes]


@dataclass(slots=True)
class _Joining:
    """The connections that have joined and those that are still missing, each a pair of lane and receiver name."""

    life: Lifecycle
    session: str
    wanted: tuple[tuple[str, str], ...]
    joined: dict[tuple[str, str], Channel] = field(default_factory=dict)
    over: bool = False
    """Whether the sender has given up."""
    changing: threading.Lock = field(default_factory=threading.Lock)

    def missing(self) -> Iterable[str]:
        return dict.fromkeys(name for lane, name in self.wanted if (lane, name) not in self.joined)

    def refusal(self, hello: Hello, proven: bool) -> str:
        """[loop's thread] See `Admission.refusal`."""
        if hello.session != self.session:
            return "it waits for another session"
        if (hello.lane, hello.name) not in self.wanted:
            return "that is not the name of a receiver of this session"
        if not proven:
            return f"{hello.name} did not prove that it knows this session's key"
        return f"{hello.name!r} is connected already" if (hello.lane, hello.name) in self.joined else ""

    def add(self, sock: socket.socket, keys: Keys, hello: Hello) -> None:
        """[loop's thread] See `Admission.on_admitted`."""
        with self.changing:
            if self.over:
                sock.close()
            else:
                self.joined[hello.lane, hello.name] = Channel(sock, keys, self.life, hello.name)
        self.life.ring()

    def wait(self, deadline: Deadline, waiting_for: str, listener: Listener) -> None:
        """Wait until another receiver may have joined. Raises as `accept_receivers`."""
        channels = {channel.fileno(): channel for channel in list(self.joined.values())}
        for descriptor in self.life.wait(dict.fromkeys(channels, select.POLLIN), deadline.remaining_s):
            # A receiver sends nothing before it is welcomed, so this is its end.
            raise channels[descriptor].lost(f"while waiting for {waiting_for}")
        deadline.check(waiting_for, part=self.life.part, hint=listener.hint)

    def give_up(self) -> None:
        """Close all connections, including one that the loop is about to add."""
        with self.changing:
            self.over = True
        for channel in self.joined.values():
            channel.close()


def welcome(channels: Iterable[Channel], deadline: Deadline) -> None:
    """[sender] Tell receivers that all of them have joined."""
    for channel in channels:
        channel.send_json({}, deadline)


def welcomed(channel: Channel, deadline: Deadline) -> None:
    """[receiver] Wait until the sender has admitted every receiver of the topology. Raises as `dial`."""
    channel.receive_json(deadline, "the sender's welcome, which needs every receiver")
