"""`VersionSender`: takes the snapshot of a publication, offers it in full or as a delta, and sends it to those that accept it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from weightlane.ckpt_engines import ClosedError, Deadline, ProtocolError, WeightlaneError

from ..codecs.delta.encoding import delta_manifest
from ..codecs.delta.format import TooDense
from ..control.messages import Go, Offer, Sent
from ..version.manifest import CODEC_DELTA, Manifest
from ..version.manifest_message import DeltaSegment
from .publication import Publication, PublicationQueue
from .rank_agreement import (
    DELTAS,
    DENSITIES,
    DIGESTS,
    MAGNITUDES,
    all_segments,
    change_from_plain,
    change_to_plain,
    delta_to_plain,
    digests_from_plain,
    magnitudes_from_plain,
    magnitudes_to_plain,
)
from .send_session import SendingRank, SendSession
from .snapshot.send_memory import SnapshotSlot
from .snapshot.snapshot import SourceBytes

_log = logging.getLogger(__name__)
_PATIENCE_S = 4.0
_PATIENCE_SNAPSHOTS = 10.0
"""A snapshot that needs memory which receivers still read waits for `_PATIENCE_S` seconds plus `_PATIENCE_SNAPSHOTS` times the
duration of the last snapshot, and then allocates other memory. A receiver loads and copies a version in about the time of a
snapshot, and needs several times that at first, when its own memory is new. Allocating other memory costs as much."""


class VersionSender:
    """Copies, offers and sends the versions of one publisher, on its snapshot thread and its send thread."""

    def __init__(self, rank: SendingRank, queue: PublicationQueue) -> None:
        self._rank = rank
        self._queue = queue
        self._snapshot_s = 0.0
        """Seconds that the last snapshot took."""

    def take_snapshot(self, publication: Publication) -> None:
        """[snapshot thread] Take the snapshot of `publication`, which can be offered and sent meanwhile. Raises the error."""
        rank, snapshot = self._rank, self._rank.snapshot
        with rank.slots.writing:
            pass  # wait for a thread that writes to the memory; later ones find that their version is superseded
        slot = rank.slots.free()
        self._wait_for_receivers(slot)
        base = rank.slots.base
        publication.progress.begin()
        publication.choice = rank.chooser.choose(has_base=base is not None)
        if rank.replicated:  # while no parameter changes
            with snapshot.reading(publication.mark):
                everything = not self._queue.proven
                publication.digests = rank.replicated.digests(publication.number, everything=everything)
        publication.slot, publication.base = slot, base
        self._queue.begin(publication)
        snapshot.take(slot.memory.data, publication.mark, publication.progress, publication.pending_blocks)
        self._snapshot_s = seconds = publication.progress.seconds
        facts = {"seconds": seconds, "nbytes": snapshot.nbytes, "participant": rank.name}
        rank.hooks.snapshot_taken(version=publication.version, facts=facts)

    def _wait_for_receivers(self, slot: SnapshotSlot) -> None:
        """Wait until no receiver reads the slot's memory any more, or replace the memory if that fails."""
        try:
            for name, version in slot.exposed:
                session = self._queue.session
                if session is None or session.name != name or session.pipeline is None:
                    raise ClosedError(f"session {name} is over.", part=self._rank.name)
                patience_s = _PATIENCE_S + _PATIENCE_SNAPSHOTS * self._snapshot_s
                session.pipeline.reclaim(version, Deadline.after(min(patience_s, self._rank.deadline_s)))
        except WeightlaneError as error:
            if self._queue.closed:
                raise
            _log.info("%s allocates other memory, since receivers may still read the old: %s", self._rank.name, error)
            slot.memory.renew()
        slot.exposed.clear()

    def offer(self, publication: Publication, session: SendSession) -> Offer | None:
        """[send thread] Prepare `publication` to be offered, and exchange with the other trainer ranks what they need for it.

        Returns the offer, which rank 0 makes for all ranks; None on other ranks, and for a superseded publication. Raises the
        error with which the version fails.
        """
        version = publication.version
        self._complete(publication, session, self._deadline())
        if self._rank.chooser.asks_density:
            self._agree_on_codec(publication, session)
        if publication.is_delta and publication.encoded_for != session.layout.plan:
            self._encode(publication, session)
        if session.agreement is not None:
            if self._rank.chooser.uses_deltas:
                session.agreement.publish(DELTAS, version, _plain_delta(publication))
            if self._rank.replicated:
                session.agreement.publish(DIGESTS, version, sorted(publication.digests.items()))
        if self._rank.number != 0:
            return None
        if session.agreement is not None and self._rank.replicated:
            values = session.agreement.collect(DIGESTS, version, self._deadline(), publication.superseded)
            self._rank.replicated.compare({name: digests_from_plain(plain) for name, plain in values.items()}, version)
        manifest, _ = self._manifest_of(publication, session, self._deadline())
        if publication.superseded.is_set:  # while it was encoded
            return None
        return Offer(
            name=self._rank.name,
            session=session.name,
            version=version,
            manifest=manifest.to_offer(),
            reason=publication.choice.reason,
        )

    def send(self, publication: Publication, session: SendSession, go: Go) -> Sent:
        """[send thread] Send this rank's bytes as `go` requests. Raises the error with which the version fails."""
        started, deadline = time.perf_counter(), Deadline.after(go.deadline_s)
        self._complete(publication, session, deadline)
        assert publication.slot is not None, "its snapshot has begun"
        segments: Sequence[Sequence[DeltaSegment]] = ()
        if go.codec == CODEC_DELTA:
            manifest, segments = self._manifest_of(publication, session, deadline)
            source = SourceBytes(self._rank.delta_memory.data, None, deadline)
        else:
            manifest = session.layout.as_version(publication.version, publication.identity)
            source = SourceBytes(publication.slot.memory.data, publication.progress, deadline)
        if manifest.codec != go.codec:
            raise ProtocolError(f"version {go.version} cannot be sent as {go.codec} any more.", part=self._rank.name)
        if manifest.lasting:
            publication.slot.exposed.add((session.name, go.version))
        nbytes = session.send(manifest, segments, source, go)
        seconds = time.perf_counter() - started
        self._rank.chooser.sent(go.codec)
        if self._rank.chooser.asks_density:
            self._note_change(publication, publication.slot)
        return Sent(
            name=self._rank.name,
            session=session.name,
            version=go.version,
            nbytes=nbytes,
            seconds=seconds,
            export_s=publication.progress.seconds,
            error=publication.pending_blocks.error.to_plain() if self._rank.quantises else None,
        )

    def _deadline(self) -> Deadline:
        return Deadline.after(self._rank.deadline_s)

    def _complete(self, publication: Publication, session: SendSession, deadline: Deadline) -> None:
        """Quantise the blocks that are divided between ranks into the snapshot, unless that was done before.

        Raises:
            WeightlaneError: The snapshot has failed.
            ClosedError: The publication is superseded, or the session is over.
            DeadlineExceededError: A rank has not published its magnitudes.
        """
        if publication.progress.error is not None:
            raise publication.progress.error
        if not self._rank.quantises:
            return
        snapshot, pending_blocks, version = self._rank.snapshot, publication.pending_blocks, publication.version
        if snapshot.is_cut:
            publication.progress.wait_read(snapshot.read_end, deadline)
        if session.agreement is not None:  # in every session: other ranks may have missed them in the session before
            session.agreement.publish(MAGNITUDES, version, magnitudes_to_plain(pending_blocks.magnitudes))
        if publication.is_complete or not snapshot.is_cut:
            return
        parts = pending_blocks.magnitudes
        if session.agreement is not None:
            values = session.agreement.collect(MAGNITUDES, version, deadline, publication.superseded)
            parts = [part for plain in values.values() for part in magnitudes_from_plain(plain)]
        with self._rank.slots.writing:
            if publication.superseded.is_set or publication.slot is None:
                raise ClosedError(f"version {version} was given up.", part=self._rank.name)
            pending_blocks.quantise_cuts(parts, publication.slot.memory.data)
            publication.is_complete = True

    def _agree_on_codec(self, publication: Publication, session: SendSession) -> None:
        """Choose the codec as all trainer ranks do. If one rank sends its part in full, all ranks do."""
        chooser = self._rank.chooser
        mine = chooser.change(self._rank.numel) if publication.is_delta else None
        changes = [mine]
        if session.agreement is not None:
            session.agreement.publish(DENSITIES, publication.version, change_to_plain(mine))
            values = session.agreement.collect(DENSITIES, publication.version, self._deadline(), publication.superseded)
            changes = [change_from_plain(plain) for plain in values.values()]
        choice = chooser.by_density(changes)
        if publication.is_delta:
            publication.choice = choice

    def _note_change(self, publication: Publication, slot: SnapshotSlot) -> None:
        """Note how many elements a sent version has changed. No snapshot begins before this thread has ended sending."""
        delta, base = publication.delta, publication.base
        if publication.is_delta and delta is not None:
            self._rank.chooser.note_change(delta.changed, delta.elements)
        elif base is not None:
            compared = self._rank.encoder.sampled_changes(base.slot.memory.data, slot.memory.data)
            self._rank.chooser.note_change(*compared)

    def _encode(self, publication: Publication, session: SendSession) -> None:
        """Encode the delta while the snapshot is taken. If it needs too many bytes, the version is sent in full."""
        assert publication.base is not None
        assert publication.slot is not None
        progress, nbytes, deadline = publication.progress, self._rank.snapshot.nbytes, self._deadline()
        delta = self._rank.encoder.encode(
            session.parts,
            publication.base.slot.memory.data,
            publication.slot.memory.data,
            self._rank.encoder.capacity_bytes,
            lambda until: progress.wait(until, deadline),
            lambda: progress.done_bytes >= nbytes,
        )
        if isinstance(delta, TooDense):
            publication.send_in_full(delta)
            return
        self._rank.delta_memory.grow(delta.nbytes)
        delta.write_into(self._rank.delta_memory.data[: delta.nbytes])
        publication.delta, publication.encoded_for = replace(delta, parts=()), session.layout.plan

    def _manifest_of(
        self, publication: Publication, session: SendSession, deadline: Deadline
    ) -> tuple[Manifest, Sequence[Sequence[DeltaSegment]]]:
        """The manifest of the delta and the segments of each rank if all ranks have a delta; else the dense manifest."""
        version, delta, base = publication.version, publication.delta, publication.base
        if publication.is_delta and delta is not None and base is not None:
            segments = [delta.segments]
            if session.agreement is not None:
                values = session.agreement.collect(DELTAS, version, deadline, publication.superseded)
                segments = all_segments(values.values(), base.version)
            if segments:
                applies_to = (base.version, base.identity)
                return delta_manifest(session.layout, version, applies_to, publication.identity, segments), segments
            publication.send_in_full("another rank cannot send a delta")
        return session.layout.as_version(version, publication.identity), ()


def _plain_delta(publication: Publication) -> list[object] | None:
    """This rank's segments for the other ranks; None if it has no delta."""
    if not publication.is_delta or publication.delta is None or publication.base is None:
        return None
    return delta_to_plain(publication.base.version, publication.delta.segments)
