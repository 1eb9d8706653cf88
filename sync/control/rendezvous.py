"""`Rendezvous`: a process's connection to the control plane of a run, with its inboxes and mailboxes.

Each participant has one connection to the hub in the coordinator's process (`weightlane.sync.control.hub.hub`). Over it the hub
sends messages for the participant's inbox as soon as they are posted, and the participant reads and writes mailboxes. Both ends
prove that they know the run's secret, which is part of the rendezvous address. All frames are signed; nothing is pickled. The
process groups of torch.distributed meet in a TCPStore, which one of their members serves.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec

import torch.distributed as dist

from weightlane.ckpt_engines import ClosedError, Deadline, ProtocolError, WeightlaneError
from weightlane.ckpt_engines.channels.channel import Frame, derive_key, new_secret
from weightlane.ckpt_engines.channels.handshake import Hello
from weightlane.ckpt_engines.channels.joining import dial
from weightlane.ckpt_engines.channels.socket_factory import host_and_port
from weightlane.ckpt_engines.engines.torch_distributed.process_group import host_store, join_store
from weightlane.ckpt_engines.waits import Lifecycle

from ..config import SILENCE_S
from .hub.hub import ControlConnection, ControlHub
from .hub.mailboxes import Member
from .messages import COORDINATOR, Kind, Message, Stop, decode, encode, from_bytes, to_bytes

_JOIN_TIMEOUT_S = 30.0
"""Time limit to connect to the hub: a thousand participants may connect at once."""
_CANCEL_S = 2.0
"""Time limit in seconds for the hub's list of present keys, which is requested after a request has timed out."""
_PORTS = 1 << 16
P = ParamSpec("P")


class PendingReply:
    """A request to the hub without a reply yet. Any thread may end it with an error (`give_up`)."""

    def __init__(self, owner: Rendezvous, number: int, question: Frame) -> None:
        self._owner, self._number, self._question = owner, number, question
        self._done = threading.Event()
        self._value = b""
        self._error: WeightlaneError | None = None

    def answer(self, value: bytes) -> None:
        """Let `result` return `value`."""
        self._value = value
        self._done.set()

    def give_up(self, error: WeightlaneError) -> None:
        """Let `result` raise `error`."""
        self._error = error
        self._done.set()

    def result(self, deadline: Deadline) -> bytes | None:
        """Wait for the reply; None if it does not arrive in time. Raises the error passed to `give_up`."""
        done = self._done.wait(deadline.remaining_s)
        if not done or self._error is not None:
            self._owner.cancel(self._number, self._question)
        if self._error is not None:
            raise self._error
        return self._value if done else None

    def present(self) -> list[str]:
        """The keys that the request's scope has now; none if the hub does not answer within `_CANCEL_S`."""
        found = self._owner.ask(_cancelling(self._number, self._question)).result(Deadline.after(_CANCEL_S))
        return [str(key) for key in json.loads(found)] if found else []


class Mailbox:
    """JSON values by key, in one scope. Every method raises `ClosedError` if the connection to the hub has ended.

    Args:
        owner: This process's connection to the hub.
        scope: The scope. A scope that is named after a session ends with it.
    """

    def __init__(self, owner: Rendezvous, scope: str) -> None:
        self._owner = owner
        self.scope = scope

    def within(self, part: str) -> Mailbox:
        """The mailbox of a part of this scope."""
        return Mailbox(self._owner, f"{self.scope}/{part}")

    def put(self, key: str, value: Any) -> None:
        """Store the JSON-representable `value` under `key`."""
        self._owner.tell(Frame(Kind.PUT, 0, self._name(key), to_bytes(value)))

    def get(self, key: str, deadline: Deadline) -> Any:
        """Wait for the value of `key`. Raises `DeadlineExceededError`, or `ClosedError` when the scope's session is over."""
        what = f"{key!r} in mailbox {self.scope}"
        asked = self._owner.ask(Frame(Kind.GET, 0, self._name(key), b""))
        if (value := asked.result(deadline)) is None:
            raise deadline.error(what, part="mailbox")
        return from_bytes(value, what)

    def gather(self, count: int) -> PendingReply:
        """Request all values of this scope once it has `count` keys; parse them with `sync.control.hub.mailboxes.gathered`."""
        return self._owner.ask(Frame(Kind.GATHER, 0, self.scope, str(count).encode()))

    def delete(self, key: str) -> None:
        """Delete the value of `key`, if it has one. No participant may be waiting for it."""
        self._owner.tell(Frame(Kind.DELETE, 0, self._name(key), b""))

    def _name(self, key: str) -> str:
        return f"{self.scope}\n{key}"


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Host and port of a run's hub, and the run's secret. Every program that has it can join the run: keep it secret."""

    host: str
    port: int
    secret: str = field(repr=False)

    def to_plain(self) -> dict[str, Any]:
        """The address as JSON-representable data."""
        return {"host": self.host, "port": self.port, "secret": self.secret}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RendezvousAddress:
        """The inverse of `to_plain`. Raises `ProtocolError` for other data."""
        try:
            host, port, secret = str(plain["host"]), int(plain["port"]), plain["secret"]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(
                f"not a rendezvous address: {type(error).__name__} {error}.",
                part="rendezvous",
                hint="It has a host, a port and a secret.",
            ) from None
        if not (isinstance(secret, str) and secret and 0 < port < _PORTS):
            raise ProtocolError(
                "not a rendezvous address: its secret is missing or its port out of range.", part="rendezvous"
            )
        return cls(host, port, secret)


class Rendezvous:
    """Connects this process to a run's control plane, until it is closed or garbage-collected. Thread-safe.

    Its methods raise `ClosedError`, which names the coordinator, if the connection to the hub has ended.
    """

    def __init__(self, address: RendezvousAddress, local_host: str) -> None:
        self.address = address
        self.local_host = local_host
        """This machine's address on the network that leads to the hub."""
        self._process = os.getpid()
        self._hosted: ControlHub | None = None
        self._send: Callable[[Frame], None]
        """Hands a frame to the hub. Never waits."""
        self._close: Callable[[], None]
        self._lock = threading.Lock()
        self._asked: dict[int, PendingReply] = {}
        """Pending requests by number."""
        self._last = 0
        self._messages: SimpleQueue[bytes | WeightlaneError] = SimpleQueue()
        """Messages from the inboxes that this process reads, and the error with which the connection has ended."""
        self._ended: WeightlaneError | None = None
        self._waits_end: WeightlaneError | None = None
        """The error of every request since `end_waits`."""

    @classmethod
    def host(cls, host: str = "127.0.0.1", port: int = 0, silence_s: float = SILENCE_S) -> Rendezvous:
        """Open a hub on `host`. Raises `AddressInUseError` if the port is taken.

        The host of a member, or of the hub, counts as gone after `silence_s` seconds of silence.
        """
        secret = new_secret()
        hub = ControlHub(host, port, _key(secret), silence_s)
        hosting = cls(RendezvousAddress(host, hub.port, secret), hub.host)
        received = _while_it_exists(hosting._received)
        member = Member(lambda frame, _digest: received(frame))
        hosting._hosted, hosting._send, hosting._close = hub, lambda frame: hub.handle(member, frame), hub.close
        _when_forgotten(hosting, hub.close)
        return hosting

    @classmethod
    def join(cls, address: RendezvousAddress | Mapping[str, Any], timeout_s: float = _JOIN_TIMEOUT_S) -> Rendezvous:
        """Connect to the hub of another process. Raises the errors of `weightlane.ckpt_engines.channels.joining.dial`."""
        if not isinstance(address, RendezvousAddress):
            address = RendezvousAddress.from_plain(address)
        life = Lifecycle("control connection", lambda: None)
        try:
            where, deadline = (address.host, address.port), Deadline.after(timeout_s)
            channel = dial(where, life, deadline, peer=COORDINATOR, key=_key(address.secret), hello=Hello())
        finally:
            life.close()
        joined = cls(address, channel.socket.getsockname()[0])
        received, ended = _while_it_exists(joined._received), _while_it_exists(joined._on_end)
        connection = ControlConnection(channel.socket, channel.keys, received, ended)
        joined._send, joined._close = connection.send, connection.close
        connection.start()
        _when_forgotten(joined, connection.abandon)
        return joined

    def close(self) -> None:
        """Leave the run; in the hub's process, close the hub. Idempotent, never waits."""
        if os.getpid() == self._process:  # else it is the parent's
            self._close()

    def end_waits(self, error: WeightlaneError) -> None:
        """Let every wait for a value in a mailbox, also a later one, raise `error`. Messages still come and go."""
        with self._lock:
            self._waits_end = error
            waiting = list(self._asked.values())
        for asked in waiting:
            asked.give_up(error)

    # -- the hub's frames ---------------------------------------------------------------------------------------------------

    def _received(self, frame: Frame) -> None:
        """Handle a frame from the hub."""
        if frame.kind == Kind.MESSAGE:
            self._messages.put(frame.payload)
            return
        with self._lock:
            asked = self._asked.pop(frame.number, None)
        if asked is None:
            return  # the request was cancelled
        if frame.kind == Kind.OVER:
            asked.give_up(ClosedError(frame.payload.decode(errors="replace"), part="mailbox"))
        else:
            asked.answer(frame.payload)

    def _on_end(self, reason: str) -> None:
        """Let all pending requests and all reads of messages raise an error, since the connection has ended."""
        error = ClosedError(
            f"the coordinator at {self.address.host}:{self.address.port} is gone: {reason}.",
            part="rendezvous",
            peer=COORDINATOR,
            hint="The process that started the run has ended, or its host or the network in between has failed.",
        )
        with self._lock:
            self._ended = error
            waiting = list(self._asked.values())
            self._asked.clear()
        for asked in waiting:
            asked.give_up(error)
        self._messages.put(error)

    def tell(self, frame: Frame) -> None:
        """Send the hub a frame that needs no reply."""
        if self._ended is not None:
            raise self._ended
        self._send(frame)

    def ask(self, question: Frame) -> PendingReply:
        """Number a request and send it to the hub. Raises the error of `end_waits`, too."""
        with self._lock:
            if (error := self._ended or self._waits_end) is not None:
                raise error
            self._last += 1
            asked = self._asked[self._last] = PendingReply(self, self._last, question)
            numbered = question._replace(number=self._last)
        self._send(numbered)
        return asked

    def cancel(self, number: int, question: Frame) -> None:
        """Cancel a request, so that the hub sends no reply. Never waits."""
        with self._lock:
            waited = self._asked.pop(number, None) is not None
        if waited and question.kind in (Kind.GET, Kind.GATHER):
            self._send(_cancelling(number, question))

    # -- messages -----------------------------------------------------------------------------------------------------------

    def listen(self, inbox: str) -> None:
        """Become the reader of the inbox `inbox`: `receive` returns the messages that are posted to it from now on."""
        self._messages = SimpleQueue()
        if self._ended is not None:
            self._messages.put(self._ended)
        self._send(Frame(Kind.LISTEN, 0, inbox, b""))

    def receive(self, deadline: Deadline | None = None) -> Message | None:
        """Wait for the next message; None if none arrives by `deadline`. Raises `ProtocolError` for a malformed message."""
        try:
            item = self._messages.get(timeout=deadline.remaining_s if deadline else None)
        except Empty:
            return None
        if isinstance(item, WeightlaneError):
            self._messages.put(item)  # the next call raises it, too
            raise item
        return decode(item)

    def stop_receiving(self) -> None:
        """Append a `Stop` message for this process's own reader."""
        self._messages.put(encode(Stop()))

    def post(self, name: str, message: Message) -> None:
        """Append `message` to the inbox `name`."""
        self.post_all([name], message)

    def post_all(self, names: Iterable[str], message: Message) -> None:
        """Append `message` to the inboxes `names`; it is encoded once."""
        payload = encode(message)
        if self._hosted is not None:
            self._hosted.post(names, payload)
            return
        for name in names:
            self.tell(Frame(Kind.POST, 0, name, payload))

    def wait_until_unread(self, inboxes: Collection[str], deadline: Deadline) -> list[str]:
        """[host] Wait until nobody reads `inboxes` any more. Returns those that have a reader at `deadline`."""
        return self._hub.wait_until_unread(inboxes, deadline)

    # -- mailboxes and stores -----------------------------------------------------------------------------------------------

    def mailbox(self, scope: str) -> Mailbox:
        """The mailbox of `scope`."""
        return Mailbox(self, scope)

    def forget_session(self, session: str) -> None:
        """[host] Drop a session's values in mailboxes. Waits for such values raise `ClosedError`."""
        if session:
            self._hub.mailboxes.forget_session(session)

    def session_key(self, session: str) -> bytes:
        """The secret of one session, for `Topology.key`."""
        return derive_key(self.address.secret, f"session/{session}")

    def store(self, scope: str, *, leads: bool, deadline: Deadline) -> dist.TCPStore:
        """The torch store in which the members of a process group meet. The member that `leads` serves it on `local_host`.

        `scope` is that of a mailbox for its address. Raises `DeadlineExceededError`, `PeerLostError` or `ProtocolError`.
        """
        mailbox = self.mailbox(scope)
        if leads:
            store, port = host_store(self.local_host)
            mailbox.put("store", {"host": self.local_host, "port": port})
            return store
        address = mailbox.get("store", deadline)
        host, port = host_and_port(
            address if isinstance(address, dict) else {}, "rendezvous", f"the member that leads {scope}"
        )
        return join_store(host, port, deadline, f"the member that leads {scope}")

    @property
    def _hub(self) -> ControlHub:
        assert self._hosted is not None, "called in the hub's process"
        return self._hosted

    @property
    def traffic(self) -> tuple[int, int]:
        """[host] Approximate number of messages and of bytes that the hub has received and sent."""
        messages, nbytes = self._hub.traffic
        return messages, nbytes


def _key(secret: str) -> bytes:
    """The key that the members of a run and its hub use to authenticate each other."""
    return derive_key(secret, "control")


def _when_forgotten(owner: object, close: Callable[[], None]) -> None:
    """Call `close`, which takes no lock, once `owner` is garbage-collected.

    A forked process leaves the call to its parent, and an exiting process leaves closing to the kernel.
    """
    process = os.getpid()
    weakref.finalize(owner, lambda: close() if os.getpid() == process else None).atexit = False


def _while_it_exists(method: Callable[P, None]) -> Callable[P, None]:
    """Call a bound `method` as long as its object exists. The caller does not keep the object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if (bound := reference()) is not None:
            bound(*args, **kwargs)

    return call


def _cancelling(number: int, question: Frame) -> Frame:
    """The frame that cancels a request, whose reply may already be on the wire. If numbered, the frame gets a reply, too."""
    payload = json.dumps([number, question.payload.decode()]).encode()
    return Frame(Kind.CANCEL, 0, question.name, payload)
