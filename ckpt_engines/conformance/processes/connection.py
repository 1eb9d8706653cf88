"""`Connection`: senders and receivers of one session, each in a process of its own, and the operations that checks do on them."""

from __future__ import annotations

import itertools
import math
import os
import secrets
from collections.abc import Sequence
from typing import Any

from ...contract.capabilities import Capabilities, Delivery
from .payload import Parcel
from .pool import Pool, RemoteHalf, first_answers

DEADLINE_S = 20.0
"""Seconds for a call that is expected to succeed: far more than any engine needs, so that a busy machine does not fail it."""
_FURTHER_FAILURES_S = 0.5
"""Seconds that `check_received` waits, after a first failure, for the other halves to report theirs."""
_sessions = itertools.count()


class Connection:
    """One or more senders and their receivers, made but not connected.

    `engine` is a name that `resolve.engine_class` takes, and `device` the torch device type of the buckets. A call that is
    expected to succeed gets `deadline_s` seconds, and counts as hanging `grace_s` seconds after its deadline.
    """

    def __init__(
        self,
        pool: Pool,
        engine: str,
        options: dict[str, Any],
        *,
        device: str,
        receivers: int,
        senders: int = 1,
        deadline_s: float = DEADLINE_S,
        grace_s: float,
    ) -> None:
        self._pool = pool
        self._engine = engine
        self._options = options
        self._device = device
        self._deadline_s = deadline_s
        self._grace_s = grace_s
        lent = pool.lend(senders + receivers, engine, grace_s)
        self.senders, self.receivers = lent[:senders], lent[senders:]
        self.topology: dict[str, Any] = {}
        self.make()

    @property
    def sender(self) -> RemoteHalf:
        """The first sender."""
        return self.senders[0]

    @property
    def halves(self) -> list[RemoteHalf]:
        """All senders, then all receivers."""
        return [*self.senders, *self.receivers]

    def make(self) -> None:
        """Make new halves in the same processes."""
        for number, half in enumerate(self.senders):
            self._start_make(half, "sender", f"trainer/{number}")
        for number, half in enumerate(self.receivers):
            self._start_make(half, "receiver", f"rollout-{number}/tp0")
        for half in self.halves:
            half.result()

    def _start_make(self, half: RemoteHalf, side: str, name: str) -> None:
        half.name = name
        device, index = self._device, half.index
        half.start("make", side=side, name=name, engine=self._engine, options=self._options, device=device, index=index)

    def exchange_addresses(self) -> Connection:
        """Fill in `topology` for a new session. Returns this connection."""
        for half in self.halves:
            half.start("address")
        self.topology = {
            "session": f"conformance-{os.getpid()}-{next(_sessions)}",
            "senders": {half.name: half.result() for half in self.senders},
            "receivers": {half.name: half.result() for half in self.receivers},
            "key": secrets.token_hex(32),
        }
        return self

    def start_connect(self, half: RemoteHalf, deadline_s: float | None = None) -> None:
        """Start to connect one half."""
        half.start("connect", topology=self.topology, deadline_s=deadline_s or self._deadline_s)

    def connect(self) -> Connection:
        """Exchange addresses and connect all halves. Returns this connection."""
        self.exchange_addresses()
        for half in self.halves:
            self.start_connect(half)
        for half in self.halves:
            half.result()
        return self

    def start_send(
        self,
        parcels: Sequence[Parcel],
        to: Sequence[RemoteHalf] | None = None,
        *,
        sender: RemoteHalf | None = None,
        deadline_s: float | None = None,
        **more: Any,
    ) -> None:
        """Start to send `parcels`, to all receivers by default; `more` are arguments of `HalfProcess.send`."""
        names = [half.name for half in (self.receivers if to is None else to)]
        (sender or self.sender).start(
            "send", parcels=parcels, receivers=names, deadline_s=deadline_s or self._deadline_s, **more
        )

    def start_receive(
        self,
        half: RemoteHalf,
        parcels: Sequence[Parcel],
        *,
        sender: RemoteHalf | None = None,
        deadline_s: float | None = None,
        **more: Any,
    ) -> None:
        """Start to receive `parcels`; `more` are arguments of `HalfProcess.receive`."""
        name = (sender or self.sender).name
        half.start("receive", parcels=parcels, sender=name, deadline_s=deadline_s or self._deadline_s, **more)

    def deliver(
        self,
        parcels: Sequence[Parcel],
        *,
        sender: RemoteHalf | None = None,
        pause_s: float = 0.0,
        at_once: int = 1,
        **more: Any,
    ) -> None:
        """Send `parcels` to every receiver and check every byte."""
        for half in self.receivers:
            self.start_receive(half, parcels, sender=sender, pause_s=pause_s, at_once=at_once)
        self.start_send(parcels, sender=sender, at_once=at_once, **more)
        self.check_received(self.receivers, sender or self.sender)

    def show(self, parcels: Sequence[Parcel], **more: Any) -> None:
        """Have every receiver view `parcels` and check every byte; `more` are arguments of `HalfProcess.show`."""
        for half in self.receivers:
            self.start_view(half, parcels)
        self.start_show(parcels, **more)
        self.check_received(self.receivers, self.sender)

    def start_show(self, parcels: Sequence[Parcel], **more: Any) -> None:
        """Start to send `parcels` as lasting buckets to all receivers; `more` are arguments of `HalfProcess.show`."""
        names = [half.name for half in self.receivers]
        self.sender.start("show", parcels=parcels, receivers=names, **{"deadline_s": self._deadline_s, **more})

    def start_view(self, half: RemoteHalf, parcels: Sequence[Parcel], *, deadline_s: float | None = None) -> None:
        """Start to view `parcels`."""
        half.start("view", parcels=parcels, sender=self.sender.name, deadline_s=deadline_s or self._deadline_s)

    def check_views(self, parcels: Sequence[Parcel]) -> None:
        """Check that every receiver's views of `parcels` still hold the right bytes."""
        for half in self.receivers:
            half.start("look", parcels=parcels)
        self.check_received(self.receivers)

    def release(self, version: int) -> None:
        """Have every receiver release `version`, and the sender reclaim it."""
        for half in self.receivers:
            half.start("release", version=version, deadline_s=self._deadline_s)
        for half in self.receivers:
            half.result()
        self.sender.call("reclaim", version=version, deadline_s=self._deadline_s)

    def check_received(self, receivers: Sequence[RemoteHalf], sender: RemoteHalf | None = None) -> None:
        """Take the results of receivers, and of `sender` if given, and fail unless every byte is right.

        After the first failure the other halves get a moment to report theirs. Wrong bytes take precedence over errors of other
        halves, which may follow from them.
        """
        failures: list[BaseException] = []
        complaints: list[str] = []
        pending = [*receivers, *([sender] if sender else [])]
        while pending:
            ready = first_answers(pending, _FURTHER_FAILURES_S if failures or complaints else math.inf)
            for half in ready:
                pending.remove(half)
                try:
                    answer = half.result()
                except Exception as error:  # noqa: BLE001 - raised below
                    failures.append(error)
                else:
                    complaints += [f"{half.name}: {text}" for text in answer or () if text]
            if not ready:
                break
        assert not complaints, f"expected the bytes that were sent, {'; '.join(complaints)}"
        if failures:
            raise failures[0]

    def late_receiver(self) -> RemoteHalf:
        """Make one more receiver, unconnected, and add it to the topology."""
        (late,) = self._pool.lend(1, self._engine, self._grace_s)
        late.index = len(self.halves)
        self._start_make(late, "receiver", f"rollout-{len(self.receivers)}/tp0")
        late.result()
        receivers = {**self.topology["receivers"], late.name: late.call("address")}
        self.topology = {**self.topology, "receivers": receivers}
        return late

    def close(self) -> None:
        """Close every half."""
        for half in self.halves:
            half.start("close")
        for half in self.halves:
            half.result()


def waits_for_receivers(capabilities: Capabilities) -> bool:
    """Whether a sender waits for its receivers. The sender of a store only writes; receivers read at any time."""
    return Delivery.STORE not in capabilities.delivery
