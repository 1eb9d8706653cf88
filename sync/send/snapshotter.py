"""`Snapshotter`: prepares memory, codec and digests for a publication, and takes its snapshot."""

from __future__ import annotations

import logging

from weightlane.ckpt_engines import ClosedError, Deadline, WeightlaneError

from .publication import Publication, PublicationQueue
from .sender_resources import SenderResources
from .snapshot.slots import SnapshotSlot

_log = logging.getLogger(__name__)
_PATIENCE_S = 4.0
_PATIENCE_SNAPSHOTS = 10.0
"""A snapshot that needs memory which receivers still read waits for `_PATIENCE_S` seconds plus `_PATIENCE_SNAPSHOTS` times the
duration of the last snapshot, and then allocates other memory. A receiver loads and copies a version in about the time of a
snapshot, and needs several times that at first, when its own memory is new. Allocating other memory costs as much."""


class Snapshotter:
    """Takes the snapshots of one publisher, on its snapshot thread."""

    def __init__(self, rank: SenderResources, queue: PublicationQueue) -> None:
        self._rank = rank
        self._queue = queue
        self._snapshot_s = 0.0
        """Seconds that the last snapshot took."""

    def take(self, publication: Publication) -> None:
        """Take the snapshot of `publication`, which can be offered and sent while it is taken. Raises the snapshot's error."""
        rank, contribution, snapshot = self._rank, self._rank.contribution, self._rank.contribution.snapshot
        with rank.slots.writing:
            pass  # wait for a thread that writes to the memory; later ones find that their version is superseded
        slot = rank.slots.free()
        self._wait_for_receivers(slot)
        base = rank.slots.base
        publication.progress.begin()
        publication.choice = rank.chooser.choose(has_base=base is not None)
        if contribution.replicated:  # while no parameter changes
            with snapshot.reading(publication.mark):
                everything = not self._queue.proven
                publication.digests = contribution.replicated.digests(publication.number, everything=everything)
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
