"""`EngineLinks`: one participant's ends of the links in a session's transfer plan."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait

import torch

from weightlane.ckpt_engines import (
    CheckpointEngine,
    ClosedError,
    Deadline,
    DeadlineExceededError,
    Delivery,
    ReceiverLink,
    SenderLink,
    Topology,
)
from weightlane.ckpt_engines.runtime.threads import DaemonThreads, start_call
from weightlane.ckpt_engines.waits import GRACE_S, HINT, result_of

from ..plan.links import PlannedLink
from ..plan.session_plan import SessionPlan
from .rendezvous import Rendezvous

_log = logging.getLogger(__name__)
_QUICK_S = 10.0
"""Longest time for a call of an engine that has no deadline because it waits for no peer."""


class EngineLinks:
    """The links of one participant in one session. `close` may be called from any thread, also during `connect`.

    Args:
        name: The participant.
        engine: The checkpoint engine, which makes the halves of the links.
        device: Device of the buckets.
        copied_to: Device to which this participant copies buckets that it views; `device` by default.
    """

    def __init__(
        self, name: str, engine: CheckpointEngine, device: torch.device, *, copied_to: torch.device | None = None
    ) -> None:
        self._name = name
        self._engine = engine
        self._device = device
        self._copied_to = copied_to or device
        self._closed = False
        self.senders: dict[int, SenderLink] = {}
        """Sending ends by the number of the link in the plan."""
        self.receivers: dict[int, ReceiverLink] = {}
        """Receiving ends by the number of the link in the plan."""

    def connect(self, rendezvous: Rendezvous, session: str, planned: SessionPlan, deadline: Deadline) -> None:
        """Connect this participant's end of each of its links in the plan, all concurrently.

        Raises the engine's error, `DeadlineExceededError` naming the peer that has published no address, or `ClosedError`.
        """
        mailbox = rendezvous.mailbox(f"links/{session}")
        links = [*planned.sent_by(self._name), *planned.received_by(self._name)]
        for link in links:
            half = self._make(link)
            if self._closed:
                self.close()
                raise ClosedError("the connection was closed while connecting.", part=self._name)
            if self._name in self._addressed(link):
                address = result_of(
                    start_call(half.address), Deadline.after(_QUICK_S), "the engine's address", self._name
                )
                mailbox.put(f"{link.number}/{self._name}", dict(address))
        threads = DaemonThreads(len(links), f"weightlane-link-{self._name}")
        connecting = [threads.submit(self._connect, rendezvous, session, link, deadline) for link in links]
        threads.shutdown(wait=False)
        done, late = wait(connecting, deadline.remaining_s + GRACE_S, FIRST_EXCEPTION)
        failure = next((error for each in done if (error := each.exception()) is not None), None)
        if failure is None and late:
            failure = deadline.error("its links to connect", part=self._name, hint=HINT)
        if failure is not None:
            self.close()  # this also ends the other threads, which are not joined
            raise failure

    def _addressed(self, link: PlannedLink) -> Sequence[str]:
        """The ranks of a link whose addresses others use: not the receivers of a store, which can be many and come later."""
        stores = Delivery.STORE in self._engine.capabilities.delivery
        return link.senders if stores else (*link.senders, *link.receivers)

    def _make(self, link: PlannedLink) -> SenderLink | ReceiverLink:
        if self._name in link.senders:
            return self.senders.setdefault(link.number, SenderLink.of(self._engine, self._name, self._device))
        receiver = ReceiverLink.of(self._engine, self._name, self._device)
        receiver.views_are_copied_to(self._copied_to)
        return self.receivers.setdefault(link.number, receiver)

    def _connect(self, rendezvous: Rendezvous, session: str, link: PlannedLink, deadline: Deadline) -> None:
        mailbox, link_session = rendezvous.mailbox(f"links/{session}"), link.session(session)

        addresses = {}
        for name in self._addressed(link):
            try:
                addresses[name] = mailbox.get(f"{link.number}/{name}", deadline)
            except DeadlineExceededError as error:
                raise deadline.error("the address of its end of a link", part=self._name, peer=name) from error
        senders = {name: addresses.pop(name) for name in link.senders}
        topology = Topology(link_session, senders, addresses, rendezvous.session_key(link_session), link.receiver_sets)
        half = self.senders.get(link.number) or self.receivers[link.number]
        half.connect(topology, deadline)

    def close(self) -> None:
        """Close every end, all at the same time. Idempotent, never raises; a call that does not end is abandoned."""
        self._closed = True
        ends: list[SenderLink | ReceiverLink] = [*self.senders.values(), *self.receivers.values()]
        deadline = Deadline.after(_QUICK_S)
        for closing in [start_call(end.close) for end in ends]:
            try:
                result_of(closing, deadline, "the engine to be closed", self._name)
            except Exception as error:  # noqa: BLE001 - of a third party's engine, and the other links are to be closed, too
                _log.warning("%s: the engine could not be closed: %s", self._name, error)
