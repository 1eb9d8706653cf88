"""`Publication`: one published version, from its snapshot to the receivers that accept it.

`SendSession`: a trainer rank's end of one session, which sends directly to rollout ranks, or through rank 0 to a store.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from weightlane.ckpt_engines import ClosedError, Deadline, ProtocolError

from ..codecs.codec_choice import Choice
from ..codecs.delta.encoding import RankDelta, delta_manifest, delta_tables
from ..codecs.delta.format import TooDense
from ..control.engine_links import EngineLinks
from ..control.messages import Connect, Go, Offer, Sent
from ..control.rendezvous import Rendezvous
from ..plan.session_plan import PlanExchange, SessionPlan
from ..version.bucket_checksums import StoredChecksums
from ..version.manifest import CODEC_DELTA, CODEC_DENSE, Manifest
from ..version.manifest_message import DeltaSegment
from ..version.packing import CopyTable, SnapshotSlice, snapshot_slices
from .pipeline import BucketSource, Destination, SendPipeline, destinations_of
from .rank_agreement import (
    DELTAS,
    DENSITIES,
    DIGESTS,
    MAGNITUDES,
    RankAgreement,
    from_plain,
    magnitudes_from_plain,
    magnitudes_to_plain,
)
from .sending_rank import DeltaBase, SendingRank, SnapshotSlot
from .shard_gather import ShardGather
from .snapshot.quantised_blocks import PendingBlocks
from .snapshot.snapshot import Progress


class SendSession:
    """A trainer rank's end of one session. Opened on one thread, connected on another, closed from any.

    Attributes:
        name: The session.
        layout: The stream of full versions; set once connected.
        parts: The parts of this rank's snapshot in that stream; set once connected.
        pipeline: Sends buckets; None until connected, and on a rank that sends its bytes to rank 0.
        agreement: Exchanges values with the other trainer ranks; None until connected, and if there is one rank only.
    """

    layout: Manifest
    parts: Sequence[SnapshotSlice]

    def __init__(self, rank: SendingRank, name: str) -> None:
        self.name = name
        self.pipeline: SendPipeline | None = None
        self.agreement: RankAgreement | None = None
        self._rank = rank
        self._closed = False
        self._links = EngineLinks(rank.name, rank.engine, rank.device)
        self._lanes: dict[int, Destination] = {}
        self._tables: list[CopyTable] = []
        """The copies from each rank's snapshot to the stream, by rank, if rank 0 gathers; else those of this rank alone."""
        self._gather: ShardGather | None = None

    def connect(self, rendezvous: Rendezvous, message: Connect, deadline: Deadline) -> SessionPlan:
        """Connect to the receivers and the other trainer ranks. Returns the session's plan.

        Raises the error that prevents the connection, or `ClosedError` if the session is closed in the meantime.
        """
        try:
            return self._connect(rendezvous, message, deadline)
        except BaseException:
            self.close()
            raise

    def _connect(self, rendezvous: Rendezvous, message: Connect, deadline: Deadline) -> SessionPlan:
        rank, publishers = self._rank, message.publishers
        if not rank.alone:
            self.agreement = RankAgreement(rendezvous.mailbox(f"agreement/{self.name}"), publishers, rank.number)
        exchange, supply = PlanExchange(rendezvous.mailbox(f"plan/{self.name}")), rank.supply_of(publishers)
        if rank.number == 0:
            exchange.supply(supply)
        planned = SessionPlan.of(supply, exchange.needed(message.needs, supply, deadline), rank.engine.capabilities)
        self.layout, regions = planned.layout, planned.layout.regions
        self.parts = snapshot_slices(rank.slices, rank.offsets, regions)
        if not rank.gathers:
            self._tables = [CopyTable.of(self.parts, self.layout)]
        else:
            self._tables = [CopyTable.of(parts, self.layout) for parts in rank.parts_of_all(regions)]
            self._gather = ShardGather.connect(rendezvous, self.name, publishers, rank.number, rank.device, deadline)
        self._links.connect(rendezvous, self.name, planned, deadline)
        if not rank.gathers or rank.number == 0:
            checksums = StoredChecksums(rendezvous.mailbox(f"checksums/{self.name}")) if rank.stores else None
            links = list(self._links.senders.values())
            self.pipeline = SendPipeline(links, rank.runtime, checksums, rank.bucket_sent)
        for lanes in destinations_of(rank.name, planned, self._links.senders):
            self._lanes |= lanes
        if self._closed:  # `close` may have run before the pipeline or the links existed
            raise ClosedError("the connection was closed while connecting.", part=rank.name)
        return planned

    def send(
        self,
        manifest: Manifest,
        segments: Sequence[Sequence[DeltaSegment]],
        memory: torch.Tensor,
        progress: Progress | None,
        deadline: Deadline,
        go: Go,
    ) -> int:
        """Send this rank's bytes of a version as `go` requests. Returns their number. Raises the engine's error.

        Args:
            manifest: The version, as it was offered.
            segments: The segments of every rank in rank order, for a delta; empty for a dense version.
            memory: The rank's bytes, 1-D uint8.
            progress: Progress of the snapshot in `memory`; None if all bytes are final.
            deadline: Limit for all waits for bytes, and for sending.
            go: Names the rollout ranks that accepted the version.
        """
        accepted, tables, rank = set(go.receivers), self._tables, self._rank
        if manifest.is_delta:
            tables = delta_tables(segments)
            if self._gather is None:
                tables = [tables[rank.number]]
        source = BucketSource(memory, progress, deadline, manifest, tables, rank.packing_buffers, self._gather)
        if self._gather is not None and rank.number != 0:
            return source.give(self._gather, rank.number)
        assert self.pipeline is not None, "connected"
        destinations: dict[int, Destination] = {}
        for lane, to in sorted(self._lanes.items()):
            # Receivers can join a store's session later, so the plan does not name all of them.
            accepting = go.receivers if rank.stores else [name for name in to.receivers if name in accepted]
            destinations |= dict.fromkeys(manifest.buckets_of(lane), replace(to, receivers=accepting))
        return self.pipeline.send_version(manifest, source, destinations, deadline, go.stall_s)

    def close(self) -> None:
        """Leave the session: its pending waits raise `ClosedError`. The links stay open until `close_links`. Idempotent."""
        self._closed = True
        for part in (self.pipeline, self.agreement, self._gather):
            if part is not None:
                part.close()

    def close_links(self) -> None:
        """Close the links, once no commit in a store needs them any more. Idempotent, never raises."""
        self._links.close()


class Publication:
    """A version that one trainer rank publishes."""

    def __init__(self, rank: SendingRank, version: int, times: int, number: int, identity: str) -> None:
        self.version, self.identity = version, identity
        self.key = (version, times)
        """The version, and how often it has been published: the same on all ranks, and larger for newer publications."""
        self.progress = Progress(f"the snapshot of version {version}", rank.name)
        """Progress of the snapshot."""
        self.is_superseded = False
        """Whether it will not be sent any more: a newer one replaces it, or its snapshot has failed."""
        self.slot: SnapshotSlot | None = None
        """The memory of its snapshot; None until the snapshot has begun."""
        self._rank = rank
        self._number = number
        """Its number among all publications of this publisher."""
        self._mark: Any = rank.snapshot.mark()
        """See `Snapshot.mark`."""
        self._choice = Choice(CODEC_DENSE, "asked for")
        """The codec it is sent with."""
        self._base: DeltaBase | None = None
        """The version that a delta applies to."""
        self._delta: RankDelta | None = None
        """This rank's segments of the delta; None until they are encoded."""
        self._encoded_for = ""
        """Digest of the plan of the session in which `_delta` was encoded."""
        self._pending_blocks = PendingBlocks()
        """Results of quantising that are not in the snapshot's memory."""
        self._is_complete = False
        """Whether blocks that are divided between ranks are quantised, too."""
        self._digests: dict[int, str] = {}
        """Digests of slices that other ranks hold as well; see `weightlane.sync.send.rank_agreement`."""

    @property
    def is_delta(self) -> bool:
        """Whether it is sent as a delta."""
        return self._choice.codec == CODEC_DELTA

    def send_in_full(self, why: str | TooDense) -> None:
        """Send the version dense instead of as a delta, for the reason `why`."""
        self._choice = Choice(CODEC_DENSE, str(why))

    # -- snapshot thread --------------------------------------------------------------------------------------------------

    def begin_snapshot(self, slot: SnapshotSlot, *, everything: bool) -> None:
        """Choose the memory and the codec, and digest the slices due now that other ranks hold as well, or `everything`."""
        rank = self._rank
        self.progress.begin()
        self._base = rank.base
        if rank.chooser is not None:
            self._choice = rank.chooser.choose(has_base=self._base is not None)
        if rank.replicated is not None:  # while no parameter changes
            with rank.snapshot.reading(self._mark):
                self._digests = rank.replicated.digests(self._number, everything=everything)
        self.slot = slot

    def take_snapshot(self) -> None:
        """Take the snapshot. Raises the error."""
        assert self.slot is not None, "its snapshot has begun"
        snapshot = self._rank.snapshot
        snapshot.take(self.slot.memory.data, self._mark, self.progress, self._pending_blocks)
        facts = {"seconds": self.progress.seconds, "nbytes": snapshot.nbytes, "participant": self._rank.name}
        self._rank.hooks.snapshot_taken(version=self.version, facts=facts)

    # -- send thread ------------------------------------------------------------------------------------------------------

    def offer(self, session: SendSession) -> Offer | None:
        """Prepare to be offered, and exchange with the other trainer ranks what they need for it.

        Returns the offer, which rank 0 makes for all ranks; None on other ranks, and once superseded. Raises the error with which
        the version fails.
        """
        rank, agreement = self._rank, session.agreement
        self._complete(session, self._deadline())
        if rank.chooser is not None and rank.chooser.asks_density:
            self._agree_on_codec(session)
        if self.is_delta and self._encoded_for != session.layout.plan:
            self._encode(session)
        if agreement is not None:
            if rank.chooser is not None:
                agreement.publish(DELTAS, self.key, self._plain_delta())
            if rank.replicated is not None:
                agreement.publish(DIGESTS, self.key, self._digests)
        if rank.number != 0:
            return None
        if agreement is not None and rank.replicated is not None:
            digests = self._collect(agreement, DIGESTS, self._deadline())
            rank.replicated.compare({name: from_plain(DIGESTS, plain) for name, plain in digests.items()}, self.version)
        manifest, _ = self._manifest_in(session, self._deadline())
        if self.is_superseded:  # while it was encoded
            return None
        return Offer(
            name=rank.name,
            session=session.name,
            version=self.version,
            manifest=manifest.to_offer(),
            reason=self._choice.reason,
            times=self.key[1],
        )

    def send(self, session: SendSession, go: Go) -> Sent:
        """Send this rank's bytes as `go` requests. Raises the error with which the version fails."""
        rank, started, deadline = self._rank, time.perf_counter(), Deadline.after(go.deadline_s)
        self._complete(session, deadline)
        assert self.slot is not None, "its snapshot has begun"
        segments: Sequence[Sequence[DeltaSegment]] = ()
        memory = self.slot.memory.data
        progress: Progress | None = self.progress
        manifest = session.layout.as_version(self.version, self.identity)
        if go.codec == CODEC_DELTA:
            manifest, segments = self._manifest_in(session, deadline)
            memory, progress = rank.delta_memory.data, None
        if manifest.codec != go.codec:
            raise ProtocolError(f"version {go.version} cannot be sent as {go.codec} any more.", part=rank.name)
        if manifest.lasting:
            self.slot.exposed.add((session.name, go.version))
        nbytes = session.send(manifest, segments, memory, progress, deadline, go)
        seconds = time.perf_counter() - started
        self._note_change(self.slot, go.codec)
        return Sent(
            name=rank.name,
            session=session.name,
            version=go.version,
            nbytes=nbytes,
            seconds=seconds,
            export_s=self.progress.seconds,
            error=self._pending_blocks.error.to_plain() if rank.quantises else None,
        )

    def _deadline(self) -> Deadline:
        return Deadline.after(self._rank.deadline_s)

    def _collect(self, agreement: RankAgreement, topic: str, deadline: Deadline) -> dict[str, Any]:
        return agreement.collect(topic, self.key, deadline, lambda: self.is_superseded)

    def _complete(self, session: SendSession, deadline: Deadline) -> None:
        """Quantise the blocks that are divided between ranks into the snapshot, unless that was done before.

        Raises:
            WeightlaneError: The snapshot has failed.
            ClosedError: The publication is superseded, or the session is over.
            DeadlineExceededError: A rank has not published its magnitudes.
        """
        if self.progress.error is not None:
            raise self.progress.error
        if not self._rank.quantises:
            return
        snapshot, pending_blocks = self._rank.snapshot, self._pending_blocks
        if snapshot.is_cut:
            self.progress.wait_read(snapshot.read_end, deadline)
        if session.agreement is not None:  # in every session: other ranks may have missed them in the session before
            session.agreement.publish(MAGNITUDES, self.key, magnitudes_to_plain(pending_blocks.magnitudes))
        if self._is_complete or not snapshot.is_cut:
            return
        parts = pending_blocks.magnitudes
        if session.agreement is not None:
            values = self._collect(session.agreement, MAGNITUDES, deadline)
            parts = [part for plain in values.values() for part in magnitudes_from_plain(plain)]
        with self._rank.writing:
            if self.is_superseded or self.slot is None:
                raise ClosedError(f"version {self.version} was given up.", part=self._rank.name)
            pending_blocks.quantise_cuts(parts, self.slot.memory.data)
            self._is_complete = True

    def _agree_on_codec(self, session: SendSession) -> None:
        """Choose the codec as all trainer ranks do. If one rank sends its part in full, all ranks do."""
        chooser = self._rank.chooser
        assert chooser is not None
        mine = chooser.change(self._rank.numel) if self.is_delta else None
        changes = [mine]
        if session.agreement is not None:
            session.agreement.publish(DENSITIES, self.key, None if mine is None else asdict(mine))
            values = self._collect(session.agreement, DENSITIES, self._deadline())
            changes = [from_plain(DENSITIES, plain) for plain in values.values()]
        choice = chooser.by_density(changes)
        if self.is_delta:
            self._choice = choice

    def _note_change(self, slot: SnapshotSlot, codec: str) -> None:
        """Note how many elements a sent version has changed. No snapshot begins before this thread has ended sending."""
        chooser = self._rank.chooser
        if chooser is None:
            return
        chooser.sent(codec)
        if not chooser.asks_density:
            return
        if self.is_delta and self._delta is not None:
            chooser.note_change(self._delta.changed, self._delta.elements)
        elif self._base is not None:
            compared = self._rank.encoder.sampled_changes(self._base.slot.memory.data, slot.memory.data)
            chooser.note_change(*compared)

    def _encode(self, session: SendSession) -> None:
        """Encode the delta while the snapshot is taken. If it needs too many bytes, the version is sent in full."""
        assert self._base is not None
        assert self.slot is not None
        progress, nbytes, deadline = self.progress, self._rank.snapshot.nbytes, self._deadline()
        delta = self._rank.encoder.encode(
            session.parts,
            self._base.slot.memory.data,
            self.slot.memory.data,
            lambda until: progress.wait(until, deadline),
            lambda: progress.done_bytes >= nbytes,
            self._rank.delta_memory.grow,
        )
        if isinstance(delta, TooDense):
            self.send_in_full(delta)
            return
        self._delta, self._encoded_for = delta, session.layout.plan

    def _plain_delta(self) -> list[object] | None:
        """The key of the publication that this rank's segments apply to, and these, as JSON; None if it has no delta."""
        if not self.is_delta or self._delta is None or self._base is None:
            return None
        return [list(self._base.key), [segment.to_plain() for segment in self._delta.segments]]

    def _manifest_in(
        self, session: SendSession, deadline: Deadline
    ) -> tuple[Manifest, Sequence[Sequence[DeltaSegment]]]:
        """The manifest of the delta and the segments of each rank if all ranks have a delta; else the dense manifest."""
        delta, base = self._delta, self._base
        if self.is_delta and delta is not None and base is not None:
            segments = [delta.segments]
            if session.agreement is not None:
                values = self._collect(session.agreement, DELTAS, deadline)
                segments = _all_segments(values.values(), base.key)
            if segments:
                applies_to = (base.key[0], base.identity)
                return delta_manifest(session.layout, self.version, applies_to, self.identity, segments), segments
            self.send_in_full("another rank cannot send a delta")
        return session.layout.as_version(self.version, self.identity), ()


def _all_segments(values: Iterable[Any], base: tuple[int, int]) -> list[tuple[DeltaSegment, ...]]:
    """The segments of every rank, in rank order; empty unless every rank has a delta against the publication `base`."""
    deltas = [from_plain(DELTAS, plain) for plain in values]
    if any(delta is None or delta[0] != base for delta in deltas):
        return []
    return [tuple(map(DeltaSegment.from_checked, segments)) for _, segments in deltas]
