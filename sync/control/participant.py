"""`Participant`: base class of publishers and subscribers, with a control thread that follows sessions and versions' outcomes."""

from __future__ import annotations

import logging
import operator
import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self

from weightlane.ckpt_engines import (
    ClosedError,
    ConfigError,
    Deadline,
    ProtocolError,
    SyncAbortedError,
    WeightlaneError,
    as_weightlane_error,
    error_from_wire,
)
from weightlane.ckpt_engines.runtime.threads import close_at_exit, start_thread
from weightlane.plugins import RunHooks, process_hooks

from ..plan.session_plan import SessionPlan
from .messages import (
    COORDINATOR,
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
"""How long `close` waits for a thread to end, in seconds."""


def checked_version(version: Any, part: str) -> int:
    """Convert `version`, which may be a NumPy integer, to int. Raises `ConfigError` unless it is an integer from 0 on."""
    try:
        number = operator.index(version)
    except TypeError:
        number = -1
    if number < 0 or isinstance(version, bool):
        raise ConfigError(
            f"a version is a whole number from 0, not {version!r}.",
            part=part,
            hint="The number of the optimizer step will do.",
        )
    return number


class Participant(ABC):
    """A publisher or subscriber, which handles the coordinator's messages on its own control thread.

    Each incarnation reads its own inbox, so a participant that replaces a dead one of the same name never reads the dead one's
    messages. Only the coordinator decides the outcome of a version: a failure here is only reported, and the coordinator may
    still send the version in another session.

    A participant that is still open when the program ends is closed then. In a forked process, `close` does nothing.

    Subclasses implement `_open_links`, `_connect_links` and `_handle`. These run on the control thread, except `_connect_links`:
    connecting waits for other participants, and must not delay the message that a new session has begun.
    """

    def __init__(
        self, name: str, rendezvous: RendezvousAddress | Mapping[str, Any], hooks: RunHooks | None = None
    ) -> None:
        self.name = name
        self.rendezvous = Rendezvous.join(rendezvous)
        self.session = ""
        self.ready_session = ""
        """The session whose links are connected; empty while there is none."""
        self.hooks = hooks or process_hooks()
        self._outcome = threading.Condition()
        """Notified when a version serves or has failed, or when no version can be committed any more."""
        self._newest = -1
        """The newest version that serves."""
        self._begun: Counter[int] = Counter()
        """Number of attempts at each later version that were begun here."""
        self._aborts: Counter[int] = Counter()
        """Number of aborts of each later version by the coordinator."""
        self._failures: dict[int, WeightlaneError] = {}
        """Why later versions were aborted."""
        self._over: WeightlaneError | None = None
        """Why no version can be committed any more."""
        self._closed = threading.Event()
        self.run_over = False
        """Whether this participant has learned that the coordinator is gone, so that `close` sends no `Left`."""
        self._process = os.getpid()
        self._inbox = f"{name}#{secrets.token_hex(4)}"
        self.rendezvous.listen(self._inbox)
        self._control: threading.Thread | None = None
        self._connecting: threading.Thread | None = None
        self._turn = threading.Lock()
        """Held while the session changes or becomes ready."""

    def start(self) -> None:
        """Start the control thread and join the run."""
        self._control = start_thread(f"weightlane-control-{self.name}", self._follow_messages)
        close_at_exit(self)
        self._tell(Joined(name=self.name, inbox=self._inbox))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, version: int, timeout_s: float) -> None:
        """Block until `version`, or a later one, serves; an engine that stores versions may still be storing it then.

        Raises `SyncAbortedError` with the same reason on every participant, or `DeadlineExceededError`.
        """
        deadline = Deadline.after(timeout_s)
        with self._outcome:
            self._outcome.wait_for(lambda: self._newest >= version or self._failure_of(version), deadline.remaining_s)
            if self._newest >= version:
                return
            if failure := self._failure_of(version):
                raise failure
        raise deadline.error(f"version {version} to be committed", part=self.name)

    def _failure_of(self, version: int) -> WeightlaneError | None:
        """Why `version` failed, or why no version can be committed any more; None otherwise."""
        with self._outcome:
            return self._failures.get(version) or self._over

    def _begin(self, version: int, *, told: bool = False) -> int:
        """Note that an attempt at `version` begins, and forget the failure of an earlier attempt. Returns their number so far.

        A failure of the same attempt is kept: the coordinator may abort it before a slow participant has begun it. With `told`, a
        message of the coordinator begins the attempt. Its abort is a later message, so any failure is of an earlier attempt.
        """
        with self._outcome:
            self._begun[version] += 1
            if told or self._aborts[version] < self._begun[version]:
                self._failures.pop(version, None)
            return self._begun[version]

    def _end_all(self, error: WeightlaneError) -> None:
        """Let every `wait` raise `error`, as no version can be committed any more."""
        with self._outcome:
            self._over = self._over or error
            self._outcome.notify_all()

    def close(self) -> None:
        """Leave the run, close the links and end the threads. Idempotent, never raises."""
        if self._closed.is_set() or self._process != os.getpid():
            return
        self._closed.set()
        self._close_links()
        closed = ClosedError("this participant was closed.", part=self.name)
        self._end_all(closed)
        self.rendezvous.end_waits(closed)  # of a thread that connects
        if not self.run_over:
            try:
                self._tell(Left(name=self.name, inbox=self._inbox))
            except WeightlaneError:
                _log.debug("%s: the coordinator was gone before close", self.name)
        self.rendezvous.stop_receiving()
        for thread in (self._control, self._connecting):
            if thread is not None and thread.is_alive() and thread is not threading.current_thread():
                thread.join(JOIN_THREAD_S)
        self._close_links()  # the control thread may have opened another one in the meantime
        self._free()
        self.rendezvous.close()

    def _disconnect(self) -> None:
        with self._turn:  # first, so that the connecting thread does not mark this session as ready
            self.session = self.ready_session = ""
        self._close_links()

    def _connect(self, message: Connect) -> None:
        """[connecting thread] Connect this participant's links, and report that to the coordinator."""
        try:
            plan = self._connect_links(message, Deadline.after(message.deadline_s))
            with self._turn:
                if self.session != message.session:
                    return  # another session has begun meanwhile
                self.ready_session = message.session
            self._tell(Connected(name=self.name, session=message.session, plan=plan.digest, relays=plan.relays))
            self._connected()
        except Exception as error:  # noqa: BLE001 - whatever happened, the coordinator must learn it
            self._report(-1, message.session, error)

    def _connected(self) -> None:  # noqa: B027 - subscribers have nothing to do then
        """[connecting thread] Called once the links are connected."""

    @abstractmethod
    def _open_links(self) -> tuple[str, EngineTraits | None]:
        """Prepare for the session that begins. Returns `Hello.need` and `Hello.traits`."""

    @abstractmethod
    def _connect_links(self, message: Connect, deadline: Deadline) -> SessionPlan:
        """[connecting thread] Compute the session's plan and connect its links; `_close_links` interrupts this."""

    @abstractmethod
    def _close_links(self) -> None:
        """Close the links, if any, and unblock the threads that use them. Never raises."""

    @abstractmethod
    def _free(self) -> None:
        """End every other thread, and free all memory. Never raises."""

    @abstractmethod
    def _handle(self, message: Message) -> None:
        """Handle a message of the current session that is not about connecting."""

    @abstractmethod
    def _aborted(self, version: int) -> None:
        """Drop all state of `version`, which was aborted."""

    @abstractmethod
    def _committed(self, version: int) -> None:
        """Note that `version` serves."""

    def _tell(self, message: Message) -> None:
        self.rendezvous.post(COORDINATOR, message)

    def _report(self, version: int, session: str, error: BaseException) -> None:
        """Report to the coordinator that `version` failed here."""
        ours = as_weightlane_error(error, self.name)
        if isinstance(ours, ClosedError):
            return  # another participant's failure has closed the links, and that participant reports it
        try:
            self._tell(Failed(name=self.name, session=session, version=version, error=ours.to_wire()))
        except WeightlaneError:
            # A waiting caller gets an error because the coordinator is gone; a script that is ending needs none.
            _log.info("%s: could not report a failure, the coordinator is gone: %s", self.name, ours)

    def _follow_messages(self) -> None:
        while True:
            try:
                message = self.rendezvous.receive()
            except ProtocolError as error:
                self._report(-1, self.session, error)
                continue
            except WeightlaneError as error:
                self.run_over = True
                if not self._closed.is_set():
                    self._close_links()
                    self._end_all(error)
                return
            if isinstance(message, Stop):
                self.run_over = True
                if not self._closed.is_set():  # the coordinator has sent it, not `close`
                    self._close_links()
                    self._end_all(ClosedError("the coordinator has closed.", part=self.name))
                    self.rendezvous.close()
                return
            if message is None or self._closed.is_set():
                continue  # `close` has begun: messages no longer matter, and its own `Stop` ends the loop
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
            need, traits = self._open_links()
            self._tell(Hello(name=self.name, session=self.session, need=need, traits=traits))
        elif isinstance(message, Abort):
            # An abort counts in any session: the version's own session may have ended already.
            self._aborted(message.version)
            with self._outcome:
                self._aborts[message.version] += 1
                reason = error_from_wire(message.error)
                self._failures[message.version] = SyncAbortedError.because(message.version, reason)
                self._outcome.notify_all()
            if message.disconnect and message.session == self.session:
                self._disconnect()
        elif isinstance(message, Committed):
            self._committed(message.version)
            with self._outcome:
                self._newest = newest = max(self._newest, message.version)
                for known in (self._begun, self._aborts, self._failures):
                    for old in [version for version in known if version <= newest]:
                        del known[old]
                self._outcome.notify_all()
        elif getattr(message, "session", None) != self.session:
            return  # a message of an earlier session
        elif isinstance(message, Connect):
            self._connecting = start_thread(f"weightlane-connect-{self.name}", self._connect, message)
        else:
            self._handle(message)
