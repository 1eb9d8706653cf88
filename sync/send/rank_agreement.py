"""Trainer ranks agree on a version before rank 0 offers it, by exchanging values through the run's hub.

Each rank publishes one value per topic and version, and a rank that needs the values collects them all in one reply. So a rank
needs two messages, however many ranks there are. The values are JSON. For each topic, a rank publishes:

- Codec (`DENSITIES`): how many of its elements the version before has changed.
- Delta (`DELTAS`): its segments. Rank 0 needs those of all ranks for the manifest. If rank 0 gathers, the others need them for
  the places of their own.
- Scales of blocks that are divided between ranks (`MAGNITUDES`): the largest magnitude of its part of each. Until these are known
  the elements of such blocks are in the rank's `PendingBlocks.cuts`.
- Equal copies (`DIGESTS`): digests of the elements that other ranks hold, too, which must be equal; see `ReplicatedShards`.
"""

from __future__ import annotations

import base64
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch

from weightlane.ckpt_engines import ClosedError, Deadline, ManifestError, ProtocolError, WeightlaneError

from ..codecs.codec_choice import RankChange
from ..control.hub.mailboxes import gathered
from ..control.messages import from_bytes
from ..control.rendezvous import Mailbox, PendingReply
from ..version.box import Box
from ..version.bucket_checksums import checksum_of
from ..version.manifest_message import DeltaSegment, segments_from_plain
from ..version.tensor_spec import LocalShard, TensorSlice, TensorSpec, raw_bytes
from .snapshot.quantised_blocks import Magnitudes

_REMEMBERED = 2
"""Number of newest versions whose values stay at the hub: other ranks may still be sending the version before."""


class Interrupt:
    """Ends the waits of other threads for replies of the hub, permanently. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: dict[PendingReply, WeightlaneError] = {}
        self.is_set = False

    def set(self) -> None:
        """Make every present and future wait inside `ends` raise its error."""
        with self._lock:
            self.is_set = True
            waits = list(self._waits.items())
        for reply, error in waits:
            reply.give_up(error)

    @contextmanager
    def ends(self, reply: PendingReply, error: WeightlaneError) -> Iterator[None]:
        """Context in which `set` makes the wait for `reply` raise `error`."""
        with self._lock:
            self._waits[reply] = error
        try:
            if self.is_set:
                reply.give_up(error)
            yield
        finally:
            with self._lock:
                del self._waits[reply]


class RankAgreement:
    """Exchanges values of all trainer ranks of one session, by topic and version.

    Args:
        mailbox: A mailbox that only this session uses.
        names: The ranks' publishers, in rank order.
        rank: This rank.
    """

    def __init__(self, mailbox: Mailbox, names: Sequence[str], rank: int) -> None:
        self._mailbox = mailbox
        self._names = list(names)
        self._rank = rank
        self._said: dict[str, list[int]] = defaultdict(list)
        """The versions with values at the hub, by topic, oldest first."""
        self._session_over = Interrupt()

    def close(self) -> None:
        """End the session: every wait in `collect` raises `ClosedError`. Idempotent."""
        self._session_over.set()

    def publish(self, topic: str, version: int, value: Any) -> None:
        """Publish this rank's JSON-representable `value` for a version."""
        mailbox, name, published = self._mailbox.within(topic), self._names[self._rank], self._said[topic]
        mailbox.within(str(version)).put(name, value)
        published[:] = [other for other in published if other != version] + [version]
        while len(published) > _REMEMBERED:
            mailbox.within(str(published.pop(0))).delete(name)

    def collect(self, topic: str, version: int, deadline: Deadline, superseded: Interrupt) -> dict[str, Any]:
        """Wait for the values of all ranks. Returns them by publisher, in rank order.

        Raises `DeadlineExceededError` naming the ranks without a value. Raises `ClosedError` as soon as the session is over or
        the version `superseded`, because a rank that already publishes a newer version publishes no value for this one.
        """
        reply = self._mailbox.within(topic).within(str(version)).gather(len(self._names))
        error = ClosedError(f"the ranks need not agree on {topic} any more.", part=topic)
        with self._session_over.ends(reply, error), superseded.ends(reply, error):
            content = reply.result(deadline)
        if content is None:
            silent = sorted(set(self._names).difference(reply.present()))
            raise deadline.error(f"the {topic} of version {version}", part=topic, peer=", ".join(silent))
        published = gathered(content)
        if strangers := set(published) - set(self._names):
            raise ProtocolError(
                f"participants that are no trainer ranks speak of it: {', '.join(sorted(strangers))}.",
                part=topic,
                hint="Give every participant of a run a name of its own.",
            )
        return {name: from_bytes(published[name], f"the {topic} of {name}") for name in self._names}


DENSITIES = "changed elements"
DELTAS = "delta segments"
MAGNITUDES = "block magnitudes"
DIGESTS = "digests of equal shards"


def change_to_plain(change: RankChange | None) -> list[Any] | None:
    """A rank's counts as JSON; None if it has none."""
    return None if change is None else list(astuple(change))


def change_from_plain(values: Any) -> RankChange | None:
    """Parse the counts of another rank; raises `ProtocolError` for anything else."""
    if values is None:
        return None
    try:
        changed, compared, elements, sparse = values
        return RankChange(int(changed), int(compared), int(elements), bool(sparse))
    except (TypeError, ValueError, OverflowError) as cause:
        raise ProtocolError(f"not a count of changed elements: {cause}.", part=DENSITIES) from None


def delta_to_plain(base_version: int, segments: Sequence[DeltaSegment]) -> list[Any]:
    """A rank's segments, and the version that they apply to, as JSON. A rank without a delta publishes None instead."""
    return [base_version, [segment.to_plain() for segment in segments]]


def all_segments(values: Iterable[Any], base_version: int) -> list[tuple[DeltaSegment, ...]]:
    """The segments of every rank, in rank order; empty unless every rank has a delta against `base_version`.

    Raises `ProtocolError` for invalid segments.
    """
    segments: list[tuple[DeltaSegment, ...]] = []
    for plain in values:
        if not isinstance(plain, list) or len(plain) != 2 or plain[0] != base_version:  # noqa: PLR2004 - version and segments
            return []
        segments.append(segments_from_plain(plain[1]))
    return segments


def magnitudes_to_plain(mine: Iterable[Magnitudes]) -> list[Any]:
    """A rank's magnitudes as JSON."""
    return [
        [
            each.name,
            *each.blocks.to_plain(),
            base64.b64encode(each.values.cpu().contiguous().numpy().tobytes()).decode(),
        ]
        for each in mine
    ]


def magnitudes_from_plain(values: Any) -> list[Magnitudes]:
    """Parse another rank's magnitudes; raises `ProtocolError` for anything else."""
    if not isinstance(values, list):
        raise ProtocolError("not a list of magnitudes.", part=MAGNITUDES)
    return [_parsed(plain) for plain in values]


def _parsed(plain: Any) -> Magnitudes:
    try:
        name, starts, shape, values = plain
        blocks = Box.from_plain([starts, shape])
        numbers = torch.frombuffer(bytearray(base64.b64decode(values, validate=True)), dtype=torch.float32)
        return Magnitudes(str(name), blocks, numbers.view(blocks.shape))
    except (TypeError, ValueError, RuntimeError) as cause:
        raise ProtocolError(f"not magnitudes: {cause}.", part=MAGNITUDES) from None


def digests_from_plain(values: Any) -> dict[int, str]:
    """Parse the digests of a rank, a list of pairs; raises `ProtocolError` for anything else."""
    try:
        return {int(number): str(digest) for number, digest in values}
    except (TypeError, ValueError) as cause:
        raise ProtocolError(f"not a list of digests: {cause}.", part=DIGESTS) from None


_BUDGET_BYTES = 4 << 20
"""Bytes that are digested for one version, once a version has committed. This takes half a millisecond."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """A slice that several ranks hold."""

    spec: TensorSpec
    box: Box
    parts: tuple[tuple[Box, torch.Tensor], ...]
    """This rank's elements, and their boxes within the slice."""

    @torch.no_grad()
    def digest(self) -> str:
        """The digest of the elements in the wire dtype."""
        if len(self.parts) == 1:
            wire = self.parts[0][1].to(self.spec.dtype).contiguous()
        else:
            wire = torch.empty(self.box.shape, dtype=self.spec.dtype, device=self.parts[0][1].device)
            for box, part in self.parts:
                wire[box.index] = part.to(self.spec.dtype)
        return checksum_of(raw_bytes(wire))


class ReplicatedShards:
    """The slices that more than one trainer rank holds, and this rank's elements of them.

    Only one rank sends each element, so data-parallel replicas that have diverged would otherwise go unnoticed. Therefore every
    rank computes digests of its replicated slices before its snapshot, while no parameter changes. Until a version has committed
    it digests all of these slices. Afterwards it digests a few for each version, in turn, at low cost. Rank 0 compares the
    digests before it offers the version.

    Args:
        replicated: All such slices, in the same order on every rank.
        shards: This rank's shards.
    """

    def __init__(self, replicated: Sequence[TensorSlice], shards: Sequence[LocalShard]) -> None:
        by_name: dict[str, list[LocalShard]] = defaultdict(list)
        for shard in shards:
            by_name[shard.spec.name].append(shard)
        self._all = list(replicated)
        self._mine: dict[int, _Slice] = {}
        for number, each in enumerate(replicated):
            parts = tuple(
                (common.within(each.box), shard.data[common.within(shard.box).index])
                for shard in by_name[each.spec.name]
                if (common := each.box.intersect(shard.box)) is not None
            )
            if parts:
                self._mine[number] = _Slice(each.spec, each.box, parts)
        self._turns = _in_turns(self._all)

    def __bool__(self) -> bool:
        return bool(self._all)

    def digests(self, publication: int, *, everything: bool) -> dict[int, str]:
        """Digests by number of the slice: with `everything` of all slices that this rank holds, else of those due now."""
        numbers = range(len(self._all)) if everything else self._turns[publication % len(self._turns)]
        return {number: self._mine[number].digest() for number in numbers if number in self._mine}

    def compare(self, values: Mapping[str, Mapping[int, str]], version: int) -> None:
        """Compare the digests of all ranks. Raises `ManifestError` naming the first slice with different values on two ranks."""
        first: dict[int, tuple[str, str]] = {}
        for rank, digests in values.items():
            for number, digest in digests.items():
                other, theirs = first.setdefault(number, (rank, digest))
                if digest != theirs:
                    each = self._all[number]
                    raise ManifestError(
                        f"version {version}: {other} and {rank} hold different values of {each.spec.name}"
                        f" {[list(each.box.starts), list(each.box.shape)]}, which must be equal.",
                        part=DIGESTS,
                        peer=rank,
                        hint="Data-parallel copies have drifted apart: look for a gradient that is not reduced over all of them,"
                        " or restart from a saved state.",
                    )


def _in_turns(slices: Sequence[TensorSlice]) -> list[list[int]]:
    """Divide the slices into groups of about `_BUDGET_BYTES`; versions digest one group each, in turn. Returns their numbers."""
    turns: list[list[int]] = [[]]
    nbytes = 0
    for number, each in enumerate(slices):
        if turns[-1] and nbytes + each.nbytes > _BUDGET_BYTES:
            turns.append([])
            nbytes = 0
        turns[-1].append(number)
        nbytes += each.nbytes
    return turns
