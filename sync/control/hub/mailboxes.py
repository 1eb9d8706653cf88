"""`Mailboxes`: the values that the members of a run share, in scopes, in the memory of the coordinator's process.

Most scopes are named after a session (``"plan/s-1a2b"``). When a session is over its scopes are dropped, and the requests of
members that still wait for their values fail.
"""

from __future__ import annotations

import json
import struct
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from weightlane.ckpt_engines.channels.channel import Frame, payload_digest

from ..messages import Kind

_ENTRY = struct.Struct("<HI")
"""Lengths of a key and its value."""
_ENDED_SESSIONS = 1024
"""How many ended sessions are remembered: a late participant may still put a value into a scope of one."""


@dataclass(eq=False)
class Member:
    """A process that is connected to the hub, and the inboxes it reads."""

    send: Callable[[Frame, bytes | None], None]
    """Sends a frame, with the digest of its payload if that is known. Never waits."""
    inboxes: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Scope:
    values: dict[str, bytes] = field(default_factory=dict)
    waits: dict[str | int, set[tuple[Member, int]]] = field(default_factory=lambda: defaultdict(set))
    """Waiting members with the numbers of their requests, by the key or the number of keys that they wait for."""
    gathered: bytes | None = None
    """The cached reply to `GATHER`; None after a value has changed."""

    def answer_to(self, wanted: str | int) -> bytes | None:
        """The value of the key `wanted`, or all values if there are `wanted` keys; None otherwise."""
        if isinstance(wanted, str):
            return self.values.get(wanted)
        if len(self.values) < wanted:
            return None
        if self.gathered is None:
            parts = ((key.encode(), value) for key, value in self.values.items())
            self.gathered = b"".join(_ENTRY.pack(len(key), len(value)) + key + value for key, value in parts)
        return self.gathered


def gathered(data: bytes) -> dict[str, bytes]:
    """Parse a reply to `Kind.GATHER` into values by key."""
    values, offset = {}, 0
    while offset < len(data):
        key_bytes, value_bytes = _ENTRY.unpack_from(data, offset)
        start = offset + _ENTRY.size + key_bytes
        values[data[offset + _ENTRY.size : start].decode()] = data[start : start + value_bytes]
        offset = start + value_bytes
    return values


class Mailboxes:
    """Values by scope and key. Every method may be called from any thread, and none waits.

    Args:
        send: Sends a frame to a member, with the digest of its payload if that is known. It must not wait.
    """

    def __init__(self, send: Callable[[Member, Frame, bytes | None], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._scopes: dict[str, _Scope] = {}
        self._ended: dict[str, None] = {}
        """Sessions that are over, the oldest first."""

    def change(self, frame: Frame) -> None:
        """Handle a `PUT` or a `DELETE`, and reply to the members that waited for the value."""
        name, _, key = frame.name.partition("\n")
        answers: list[tuple[Member, int, bytes]] = []
        with self._lock:
            if frame.kind == Kind.PUT and not self._is_over(name):
                scope = self._scopes.setdefault(name, _Scope())
                scope.values[key] = frame.payload
                scope.gathered = None
                counts = [wanted for wanted in scope.waits if isinstance(wanted, int)]
                for wanted in (key, *counts):
                    if wanted in scope.waits and (value := scope.answer_to(wanted)) is not None:
                        answers += [(*wait, value) for wait in scope.waits.pop(wanted)]
            elif frame.kind == Kind.DELETE and (known := self._scopes.get(name)) is not None:
                known.values.pop(key, None)
                known.gathered = None
                self._drop_if_empty(name, known)
        digests: dict[int, bytes] = {}
        for member, number, value in answers:  # many may have waited for the same value
            if (digest := digests.get(id(value))) is None:
                digest = digests[id(value)] = payload_digest(value)
            self._send(member, Frame(Kind.VALUE, number, "", value), digest)

    def answer(self, member: Member, frame: Frame) -> None:
        """Reply to a `GET`, `GATHER` or `CANCEL` of `member`, now or once the value exists."""
        name, _, key = frame.name.partition("\n")
        with self._lock:
            over = self._is_over(name)
            scope = self._scopes.setdefault(name, _Scope())
            number, asked = json.loads(frame.payload) if frame.kind == Kind.CANCEL else (frame.number, frame.payload)
            wanted = int(asked) if asked else key
            value: bytes | None
            if frame.kind == Kind.CANCEL:
                scope.waits[wanted].discard((member, number))
                if not scope.waits[wanted]:
                    del scope.waits[wanted]
                value = json.dumps(list(scope.values)).encode()
            else:
                value = scope.answer_to(wanted)
                if value is None and not over:
                    scope.waits[wanted].add((member, number))
            self._drop_if_empty(name, scope)
        if value is None and over:
            self._send(member, _over(frame.number, name), None)
        elif value is not None and frame.number:
            self._send(member, Frame(Kind.VALUE, frame.number, "", value), None)

    def forget_session(self, session: str) -> None:
        """Drop the scopes of `session` and of its links, and send `OVER` to the members that wait in them."""
        with self._lock:
            self._ended[session] = None
            if len(self._ended) > _ENDED_SESSIONS:
                del self._ended[next(iter(self._ended))]
            over = {name: self._scopes.pop(name) for name in list(self._scopes) if self._is_over(name)}
        for name, scope in over.items():
            for member, number in chain.from_iterable(scope.waits.values()):
                self._send(member, _over(number, name), None)

    def forget_member(self, member: Member) -> None:
        """Drop all requests of a member that is gone."""
        with self._lock:
            for name, scope in list(self._scopes.items()):
                for wanted, waiting in list(scope.waits.items()):
                    waiting -= {wait for wait in waiting if wait[0] is member}
                    if not waiting:
                        del scope.waits[wanted]
                self._drop_if_empty(name, scope)

    def _is_over(self, scope: str) -> bool:
        session = scope.split("/")[1] if "/" in scope else ""
        return session in self._ended or session.rpartition("-")[0] in self._ended

    def _drop_if_empty(self, name: str, scope: _Scope) -> None:
        if not scope.values and not scope.waits:
            del self._scopes[name]


def _over(number: int, scope: str) -> Frame:
    """The reply to a request in a scope whose session is over."""
    return Frame(Kind.OVER, number, "", f"the session of mailbox {scope} is over.".encode())
