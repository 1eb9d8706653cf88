"""What publishers and subscribers have in common: an inbox thread and the life of one connection."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Self

from weightlane.ckpt_engines import (
    ClosedError,
    Deadline,
    ProtocolError,
    SyncAbortedError,
    Topology,
    WeightlaneError,
    as_weightlane_error,
    error_from_wire,
)
from weightlane.ckpt_engines.runtime.at_exit import close_at_exit, start_thread
from weightlane.plugins import RunHooks, process_hooks

from ..plan.session_plan import SessionPlan
from .hub.frames import COORDINATOR
from .messages import (
    Abort,
    Committed,
    Connect,
    Connected,
    EngineTraits,
    Failed,
    Hello,
    Joined,
    Left,
    Message,
    Reset,
    Stop,
)
from .rendezvous import Rendezvous, RendezvousAddress

_log = logging.getLogger(__name__)
JOIN_THREAD_S = 5.0
"""How long closing waits for a thread that ends by itself."""


class Participant(ABC):
    """A named member of a run that follows the coordinator's messages on its own control thread.

    Each incarnation reads an inbox of its own, so one that takes the place of a dead participant of the same name never sees
    what was meant for that. Verdicts on versions come from the coordinator alone: what fails here is reported, and the
    coordinator may still carry the version over on another connection.

    What is still open when the program ends is closed then. In a process that was forked from this one, closing does nothing.

    Subclasses implement `_open_half` (a fresh transport half), `_connect_half` and `_handle` (every message that is not
    about connecting). All run on the control thread, except `_connect_half`: connecting waits for others, and must not keep
    this participant from hearing that it is to begin anew.
    """

    def __init__(
        self, name: str, rendezvous: RendezvousAddress | Mapping[str, Any], hooks: RunHooks | None = None
    ) -> None:
        self.name = name
        self.rendezvous = Rendezvous.join(rendezvous)
        self.session = ""
        self.ready_session = ""
        """The session whose transport is up; empty while there is none."""
        self.hooks = hooks or process_hooks()
        self._outcomes = VersionOutcomes()
        self._closed = threading.Event()
        self._over = False
        """Whether the run has ended: nobody is there to be told that this participant leaves."""
        self._process = os.getpid()
        self._inbox = self.rendezvous.inbox(f"{name}#{secrets.token_hex(4)}")
        self._control: threading.Thread | None = None
        self._connecting: threading.Thread | None = None
        self._turn = threading.Lock()
        """Held while the session changes or becomes ready."""

    def start(self) -> None:
        """Start the control thread and join the run."""
        self._control = start_thread(f"weightlane-control-{self.name}", self._follow)
        close_at_exit(self)
        self._tell(Joined(name=self.name, inbox=self._inbox.name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the run, close the transport and end the threads. Idempotent, never raises."""
        if self._closed.is_set() or self._process != os.getpid():
            return
        self._closed.set()
        self._close_half()
        self._outcomes.fail_all(ClosedError("this participant was closed.", part=self.name))
        if not self._over:
            try:
                self._tell(Left(name=self.name, inbox=self._inbox.name))
            except WeightlaneError:
                _log.debug("%s: the coordinator was gone before close", self.name)
        self._inbox.stop()
        for thread in (self._control, self._connecting):
            if thread is not None and thread.is_alive() and thread is not threading.current_thread():
                thread.join(JOIN_THREAD_S)
        self._close_half()  # one that the control thread opened meanwhile
        self._free()
        self.rendezvous.close()

    def _disconnect(self) -> None:
        with self._turn:  # first, so that whoever is connecting keeps nothing
            self.session = self.ready_session = ""
        self._close_half()
        self._outcomes.notify()

    def _connect(self, message: Connect) -> None:
        """What the connecting thread does."""
        try:
            key = self.rendezvous.session_key(message.session)
            topology = Topology(message.session, message.senders, message.receivers, key)
            plan = self._connect_half(message, topology, Deadline.after(message.deadline_s))
            with self._turn:
                if self.session != message.session:
                    return  # it has begun anew meanwhile
                self.ready_session = message.session
            agreed = {} if plan is None else {"plan": plan.digest, "relays": plan.relays}
            self._tell(Connected(name=self.name, session=message.session, **agreed))
            self._connected()
        except Exception as error:  # noqa: BLE001 - whatever happened, the coordinator must learn it
            self._report(-1, message.session, error)

    def _connected(self) -> None:
        """The transport is up."""
        self._outcomes.notify()

    @abstractmethod
    def _open_half(self) -> tuple[dict[str, Any], EngineTraits | None]:
        """Make a fresh transport half; its address (empty when this participant has none), and a sender's traits."""

    def _said_need(self) -> str:
        """Say in the session's mailbox what is needed here; returns where. See `weightlane.sync.plan.session_plan`."""
        return ""

    @property
    def _can_relay(self) -> bool:
        """Whether this participant can hand on what it gets."""
        return False

    @abstractmethod
    def _connect_half(self, message: Connect, topology: Topology, deadline: Deadline) -> SessionPlan | None:
        """Connect what `_open_half` has made, on a thread of its own; `_close_half` ends it.

        Returns the session's plan; None where all goes through one stream.
        """

    @abstractmethod
    def _close_half(self) -> None:
        """Close the transport half, if any; unblocks whoever uses it. Never raises."""

    @abstractmethod
    def _free(self) -> None:
        """End every other thread, and give back all memory. Never raises."""

    @abstractmethod
    def _handle(self, message: Message) -> None:
        """React to a message of the current session."""

    @abstractmethod
    def _aborted(self, version: int) -> None:
        """`version` was given up: forget what is kept for it."""

    @abstractmethod
    def _committed(self, version: int) -> None:
        """`version` serves."""

    def _tell(self, message: Message) -> None:
        self.rendezvous.post(COORDINATOR, message)

    def _report(self, version: int, session: str, error: BaseException) -> None:
        """Tell the coordinator that `version` failed here."""
        ours = as_weightlane_error(error, self.name)
        if isinstance(ours, ClosedError):
            return  # somebody else's failure closed the transport under us, and they have told
        try:
            self._tell(Failed(name=self.name, session=session, version=version, error=ours.to_wire()))
        except WeightlaneError:
            # Whoever waits here learns that the coordinator is gone; a script that ends has nothing to hear.
            _log.info("%s: could not report a failure, the coordinator is gone: %s", self.name, ours)

    def _follow(self) -> None:
        while True:
            try:
                message = self._inbox.get()
            except ProtocolError as error:
                self._report(-1, self.session, error)
                continue
            except WeightlaneError as error:
                self._over = True
                if not self._closed.is_set():
                    self._close_half()
                    self._outcomes.fail_all(error)
                return
            if isinstance(message, Stop):
                self._over = True
                if not self._closed.is_set():  # the coordinator's: the run is over
                    self._close_half()
                    self._outcomes.fail_all(ClosedError("the coordinator has closed.", part=self.name))
                return
            if self._closed.is_set():
                continue  # read, so that nobody waits for it to be; the `Stop` of `close` ends this
            try:
                self._dispatch(message)
            except Exception as error:  # noqa: BLE001 - whatever happened, the coordinator must learn it
                self._report(getattr(message, "version", -1), self.session, error)

    def _dispatch(self, message: Message) -> None:
        if isinstance(message, Reset):
            self._disconnect()
            if self._connecting is not None:
                self._connecting.join(JOIN_THREAD_S)
            with self._turn:
                self.session = message.session
            address, traits = self._open_half()
            self._tell(
                Hello(
                    name=self.name,
                    session=self.session,
                    address=address,
                    traits=traits,
                    need=self._said_need(),
                    relays=self._can_relay,
                )
            )
        elif isinstance(message, Abort):
            # A verdict counts whatever the session: the connection may have been given up already.
            self._aborted(message.version)
            self._outcomes.fail(
                message.version, SyncAbortedError.because(message.version, error_from_wire(message.error))
            )
            if message.disconnect and message.session == self.session:
                self._disconnect()
        elif isinstance(message, Committed):
            self._committed(message.version)
            self._outcomes.succeed(message.version)
        elif getattr(message, "session", None) != self.session:
            return  # a leftover of an earlier connection
        elif isinstance(message, Connect):
            self._connecting = start_thread(f"weightlane-connect-{self.name}", self._connect, message)
        else:
            self._handle(message)


class VersionOutcomes:
    """How versions ended, for threads that wait for it. Remembers the newest outcome only."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._committed = -1
        self._begun: Counter[int] = Counter()
        """How often each version was begun here."""
        self._verdicts: Counter[int] = Counter()
        """How often it was heard that it failed."""
        self._failed: dict[int, WeightlaneError] = {}
        self._closed: WeightlaneError | None = None

    def begin(self, version: int, *, told: bool = False) -> None:
        """`version` is tried, once more perhaps: forget an earlier failure.

        One that has come for this very try, because this participant is later than others, stands. None has where it was
        `told` to begin by a message, since verdicts come by messages, too, and after it.
        """
        with self._changed:
            self._begun[version] += 1
            if told or self._verdicts[version] < self._begun[version]:
                self._failed.pop(version, None)

    def succeed(self, version: int) -> None:
        """`version` serves."""
        with self._changed:
            self._committed = max(self._committed, version)
            self._failed = {newer: error for newer, error in self._failed.items() if newer > version}
            for counts in (self._begun, self._verdicts):
                for old in [each for each in counts if each <= version]:
                    del counts[old]
            self._changed.notify_all()

    def fail(self, version: int, error: WeightlaneError) -> None:
        """`version` was given up."""
        with self._changed:
            self._verdicts[version] += 1
            self._failed[version] = error
            self._changed.notify_all()

    def fail_all(self, error: WeightlaneError) -> None:
        """Nothing will ever change again."""
        with self._changed:
            self._closed = self._closed or error
            self._changed.notify_all()

    def failure(self, version: int) -> WeightlaneError | None:
        """Why `version` failed, or why nothing can succeed any more; None while it is well."""
        with self._changed:
            return self._failed.get(version) or self._closed

    def wait(self, version: int, deadline: Deadline, part: str) -> None:
        """Return when `version` (or a later one) serves; raise why it does not."""
        self.wait_until(
            lambda: self._committed >= version, version, deadline, f"version {version} to be committed", part
        )

    def wait_until(
        self, done: Callable[[], bool], version: int, deadline: Deadline, waiting_for: str, part: str
    ) -> None:
        """Return when `done()`; raise the failure of `version`, or `DeadlineExceededError`."""
        with self._changed:
            self._changed.wait_for(
                lambda: done() or version in self._failed or self._closed is not None, deadline.remaining_s
            )
            if done():
                return
            if failure := self._failed.get(version) or self._closed:
                raise failure
        raise deadline.error(waiting_for, part=part)

    def notify(self) -> None:
        """Let waiters look again."""
        with self._changed:
            self._changed.notify_all()
