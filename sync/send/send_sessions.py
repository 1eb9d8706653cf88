"""A publisher's end of the connection: what it sends from, and what it connects for each session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from weightlane.ckpt_engines import CheckpointEngine, ClosedError, Deadline, Delivery, SenderLink, Topology
from weightlane.ckpt_engines.links.bounded_calls import address_of, close_all
from weightlane.ckpt_engines.links.buffer_device import buffer_device
from weightlane.ckpt_engines.links.link import sender_link
from weightlane.ckpt_engines.runtime.devices import runtime_of

from ..config import Network
from ..control.engine_links import EngineLinks
from ..control.messages import Connect, EngineTraits
from ..control.rendezvous import Rendezvous
from ..plan.session_plan import PlanExchange, SessionPlan, Supply
from ..version.manifest import Manifest
from ..version.stream_parts import parts_of
from .bucket_source import BUFFERS
from .contribution import Contribution
from .pipeline import OnSent
from .send_session import DirectSendSession, GatheredSendSession, SendSession, SessionRequest
from .snapshot.send_memory import SendMemory


class SendSessions:
    """Of one trainer rank. `disconnect` may be called from any thread, the rest from one at a time.

    Args:
        name: The publisher.
        rank: This rank.
        engine: The transport.
        ours: What is sent.
        bucket_bytes: Payload of a bucket.
        checksummed: Whether buckets are checksummed.
        uses_deltas: Whether there may be deltas.
        network: What links carry; None to have nobody hand anything on.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        engine: CheckpointEngine,
        ours: Contribution,
        *,
        bucket_bytes: int,
        checksummed: bool,
        uses_deltas: bool,
        network: Network | None,
    ) -> None:
        self._name, self._rank, self._engine, self._ours = name, rank, engine, ours
        # By it everybody chooses routes, and rollout ranks know no buckets but those that are sent.
        self._network = network and replace(network, bucket_bytes=bucket_bytes)
        self._bucket_bytes, self._checksummed, self._uses_deltas = bucket_bytes, checksummed, uses_deltas
        self._stored: Manifest | None = None
        """The stream of whole tensors that an engine gets which stores."""
        if engine.capabilities.persistent:
            self._stored = ours.layout(bucket_bytes, checksummed=checksummed)
        alone = len(ours.shares) == 1
        self.places = ours.places(self._stored)
        """First byte of each slice in a snapshot."""
        self.snapshot = ours.snapshot(self.places)
        """How one is taken."""
        self.device = buffer_device(engine, ours.device, name)
        """Where it is."""
        self.runtime = runtime_of(self.device)
        """Of that."""
        self._nbytes = self.snapshot.nbytes
        if self._stored is not None and alone:
            self._nbytes = max(self._nbytes, self._stored.total_bytes)
        # Where rank 0 gathers, nobody sends from a snapshot.
        self._owner = engine if self._stored is None or alone else None
        self._buffers: list[SendMemory] = []
        """Two to pack buckets into, from the first time on that one does not lie in the snapshot as in the stream."""
        self._changed = threading.Lock()
        self._session = ""
        self._sender: SenderLink | None = None
        """Of rank 0, where it gathers."""
        self._halves: EngineLinks | None = None
        """Where it does not."""
        self._sending: SendSession | None = None
        self.reading: list[Future[None]] = []
        """Of sessions that are over, what is still being sent: an engine's call may take a while to end."""

    @property
    def stores(self) -> bool:
        """Whether versions can be read again without the trainer."""
        return self._stored is not None

    @property
    def sending(self) -> SendSession | None:
        """What is sent through; None while no session is up."""
        return self._sending

    def snapshot_memory(self) -> SendMemory:
        """Memory for a snapshot. Raises `StorageError`."""
        return SendMemory(self._owner, self._nbytes, self.device, copied_from=self.snapshot.runtime)

    def delta_memory(self) -> SendMemory:
        """Memory for a delta, of no size yet."""
        return SendMemory(self._owner, 0, self.device)

    def open(self, session: str) -> tuple[dict[str, Any], EngineTraits | None]:
        """Begin a session; the address of what gathers, and on rank 0 the engine's traits."""
        address: dict[str, Any] = {}
        with self._changed:
            self._session = session
            if self._stored is None:
                self._halves = EngineLinks(self._name, self._engine, self.device)
            elif self._rank == 0:
                self._sender = sender_link(self._engine, self._name, self.device)
                address = address_of(self._sender, self._name)
        if self._rank != 0:
            return {}, None
        facts = self._engine.capabilities
        traits = EngineTraits(
            selective=not facts.delivery.isdisjoint({Delivery.POINT_TO_POINT, Delivery.STORE}),
            elastic=facts.elastic,
            persistent=facts.persistent,
        )
        return address, traits

    def connect(
        self, rendezvous: Rendezvous, message: Connect, topology: Topology, deadline: Deadline, on_sent: OnSent
    ) -> SessionPlan | None:
        """Connect; the session's plan, if there is one. Raises `ClosedError` if the session is over meanwhile."""
        opening = SessionRequest(
            self._name,
            self._rank,
            rendezvous,
            message,
            deadline,
            uses_deltas=self._uses_deltas,
            quantises=bool(self._ours.scheme),
            replicas=self._ours.replicas,
            device=self.device,
            buffers=self._packing_memory,
            on_sent=on_sent,
        )
        with self._changed:  # this thread may be late, and another session begun
            current = self._session == message.session
            sender, halves = (self._sender, self._halves) if current else (None, None)
        held = self._ours.held
        planned: SessionPlan | None = None
        sending: SendSession | None = None
        if self._stored is not None and current:
            tables = self._ours.tables(self._stored, self.places)
            parts = parts_of(held, self.places, self._stored.regions)
            sending = GatheredSendSession(
                opening, self._stored, tables, parts, sender=sender, topology=topology, device=self.device
            )
        elif halves is not None:
            planned = self._plan(rendezvous, message, deadline)
            parts = parts_of(held, self.places, planned.layout.regions)
            sending = DirectSendSession(opening, planned, parts, halves)
        with self._changed:
            if kept := self._session == message.session and sending is not None:
                self._sending = sending
        if not kept:
            if sending is not None:
                sending.close()
            raise ClosedError("the connection was closed while connecting.", part=self._name)
        return planned

    def _plan(self, rendezvous: Rendezvous, message: Connect, deadline: Deadline) -> SessionPlan:
        board = PlanExchange(rendezvous.mailbox(f"plan/{message.session}"))
        shares = dict(zip(message.publishers, self._ours.shares, strict=True))
        supply = Supply(shares, self._bucket_bytes, self._checksummed, self._ours.scheme, self._network)
        if self._rank == 0:
            board.supply(supply)
        needed = board.needed(message.needs, supply, deadline)
        return SessionPlan(supply, needed, self._engine.capabilities, may_relay=message.relays)

    def _packing_memory(self, nbytes: int) -> Sequence[torch.Tensor]:
        """Two buffers of at least so many bytes."""
        while len(self._buffers) < BUFFERS:
            self._buffers.append(SendMemory(self._engine, 0, self.device))
        for memory in self._buffers:
            memory.grow(nbytes, exactly=True)
        return [memory.data for memory in self._buffers]

    def disconnect(self) -> Callable[[], None]:
        """End the session. Idempotent. Returns what closes the engine's half that stores, which may have a version to commit."""
        with self._changed:
            sending, halves, sender = self._sending, self._halves, self._sender
            self._session, self._sending, self._halves, self._sender = "", None, None, None
            if sending is not None and sending.pipeline is not None and sending.pipeline.sending is not None:
                self.reading = [each for each in (*self.reading, sending.pipeline.sending) if not each.done()]
        for part in (sending, halves):
            if part is not None:
                part.close()
        return lambda: close_all([sender] if sender is not None else [], self._name)

    def close(self) -> None:
        """Give the memory back; nothing is sent any more."""
        self.snapshot.close()
        for memory in self._buffers:
            memory.close()
