"""Trainer ranks agree on a version before rank 0 offers it, by exchanging values through the run's hub.

Each rank publishes one value per topic and publication, and a rank that needs the values collects them all in one reply. So a
rank needs two messages, however many ranks there are. The values are JSON. For each topic, a rank publishes:

- Codec (`DENSITIES`): how many of its elements the version before has changed.
- Delta (`DELTAS`): its segments, and the publication that they apply to; None without a delta. Rank 0 needs those of all ranks
  for the manifest. If rank 0 gathers, the others need them for the places of their own.
- Scales of blocks that are divided between ranks (`MAGNITUDES`): the largest magnitude of its part of each. Until these are known
  the elements of such blocks are in the rank's `PendingBlocks.cuts`.
- Equal copies (`DIGESTS`): digests of the elements that other ranks hold, too, which must be equal; see `ReplicatedShards`.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from pydantic import Base64Bytes, TypeAdapter, ValidationError

from weightlane.ckpt_engines import ClosedError, Deadline, ManifestError, ProtocolError

from ..codecs.codec_choice import RankChange
from ..control.hub.mailboxes import gathered
from ..control.messages import from_bytes
from ..control.rendezvous import Mailbox
from ..version.box import Box
from ..version.bucket_checksums import checksum_of
from ..version.manifest_message import Counts, Segment
from ..version.tensor_spec import LocalShard, TensorSlice, parts_in, raw_bytes
from .snapshot.quantised_blocks import Magnitudes

_REMEMBERED = 2
"""Number of newest versions whose values stay at the hub: other ranks may still be sending the version before."""


class RankAgreement:
    """Exchanges values of all trainer ranks of one session, by topic and publication (`Publication.key`).

    Args:
        mailbox: A mailbox that only this session uses.
        names: The ranks' publishers, in rank order.
        rank: This rank.
    """

    def __init__(self, mailbox: Mailbox, names: Sequence[str], rank: int) -> None:
        self._mailbox = mailbox
        self._names = list(names)
        self._rank = rank
        self._said: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """The publications with values at the hub, by topic, oldest first."""
        self._closed = False
        self.give_up_over: Callable[[], None] = _nothing_waits
        """Makes a thread that waits in `collect` raise `ClosedError` if the session is over, or its version superseded."""

    def close(self) -> None:
        """End the session: every wait in `collect` raises `ClosedError`. Idempotent."""
        self._closed = True
        self.give_up_over()

    def publish(self, topic: str, key: tuple[int, int], value: Any) -> None:
        """Publish this rank's JSON-representable `value` for a publication."""
        name, published = self._names[self._rank], self._said[topic]
        self._values(topic, key).put(name, value)
        published[:] = [other for other in published if other != key] + [key]
        while len(published) > _REMEMBERED:
            self._values(topic, published.pop(0)).delete(name)

    def _values(self, topic: str, key: tuple[int, int]) -> Mailbox:
        return self._mailbox.within(topic).within("{}.{}".format(*key))

    def collect(
        self, topic: str, key: tuple[int, int], deadline: Deadline, is_superseded: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Wait for the values of all ranks, on one thread at a time. Returns them by publisher, in rank order.

        Raises `DeadlineExceededError` naming the ranks without a value. Raises `ClosedError` as soon as the session is over or
        the publication superseded, because a rank with a newer one publishes no value for this one.
        `give_up_over` must follow when `is_superseded` becomes true.
        """
        reply = self._values(topic, key).gather(len(self._names))
        error = ClosedError(f"the ranks need not agree on {topic} any more.", part=topic)

        def give_up_over() -> None:
            if self._closed or is_superseded():
                reply.give_up(error)

        self.give_up_over = give_up_over  # set before it is called: `close` sets `_closed` first, and then calls it
        try:
            give_up_over()
            content = reply.result(deadline)
        finally:
            self.give_up_over = _nothing_waits
        if content is None:
            silent = sorted(set(self._names).difference(reply.present()))
            raise deadline.error(f"the {topic} of version {key[0]}", part=topic, peer=", ".join(silent))
        published = gathered(content)
        if strangers := set(published) - set(self._names):
            raise ProtocolError(
                f"participants that are no trainer ranks speak of it: {', '.join(sorted(strangers))}.",
                part=topic,
                hint="Give every participant of a run a name of its own.",
            )
        return {name: from_bytes(published[name], f"the {topic} of {name}") for name in self._names}


def _nothing_waits() -> None:
    """No thread waits in `collect`."""


DENSITIES = "changed elements"
DELTAS = "delta segments"
MAGNITUDES = "block magnitudes"
DIGESTS = "digests of equal shards"
_FORMS: dict[str, TypeAdapter[Any]] = {
    DENSITIES: TypeAdapter(RankChange | None),
    DELTAS: TypeAdapter(tuple[tuple[int, int], list[Segment]] | None),
    MAGNITUDES: TypeAdapter(list[tuple[str, Counts, Counts, Base64Bytes]]),
    DIGESTS: TypeAdapter(dict[int, str]),
}


def from_plain(topic: str, value: Any) -> Any:
    """Parse the value of another rank; raises `ProtocolError` for anything else."""
    try:
        return _FORMS[topic].validate_python(value)
    except ValidationError as error:
        raise ProtocolError(f"no valid {topic}: {error.errors()[0]['msg']}.", part=topic) from None


def magnitudes_to_plain(mine: Iterable[Magnitudes]) -> list[Any]:
    """A rank's magnitudes as JSON."""
    return [
        [each.name, *each.blocks.to_plain(), base64.b64encode(each.values.cpu().contiguous().numpy().data).decode()]
        for each in mine
    ]


def magnitudes_from_plain(value: Any) -> list[Magnitudes]:
    """Parse another rank's magnitudes; raises `ProtocolError` for anything else."""
    try:
        return [
            Magnitudes(
                name,
                Box(tuple(starts), tuple(shape)),
                torch.frombuffer(bytearray(values), dtype=torch.float32).view(shape),
            )
            for name, starts, shape, values in from_plain(MAGNITUDES, value)
        ]
    except (RuntimeError, ValueError) as cause:
        raise ProtocolError(f"no valid {MAGNITUDES}: {cause}.", part=MAGNITUDES) from None


_BUDGET_BYTES = 4 << 20
"""Bytes that are digested for one version, once a version has committed. This takes half a millisecond."""


@torch.no_grad()
def _digest(each: TensorSlice, parts: Sequence[LocalShard]) -> str:
    """The digest of a slice in the wire dtype; `parts` are its elements on this rank."""
    if len(parts) == 1:
        wire = parts[0].data.to(each.spec.dtype).contiguous()
    else:
        wire = torch.empty(each.box.shape, dtype=each.spec.dtype, device=parts[0].data.device)
        for part in parts:
            wire[part.box.within(each.box).index] = part.data.to(each.spec.dtype)
    return checksum_of(raw_bytes(wire))


class ReplicatedShards:
    """The slices that more than one trainer rank holds, and this rank's elements of them.

    Only one rank sends each element, so data-parallel replicas that have diverged would otherwise go unnoticed. Therefore every
    rank computes digests of its replicated slices before its snapshot, while no parameter changes. Until a version has committed
    it digests all of these slices. Afterwards it digests a few for each version, in turn, at low cost. Rank 0 compares the
    digests before it offers the version.
    """

    def __init__(self, replicated: Sequence[TensorSlice], shards: Sequence[LocalShard]) -> None:
        self._all = list(replicated)
        self._mine = [parts for _, parts in parts_in(replicated, shards)]
        """This rank's parts of each slice."""
        self._turns = _in_turns(self._all)

    def digests(self, publication: int, *, everything: bool) -> dict[int, str]:
        """Digests by number of the slice: with `everything` of all slices that this rank holds, else of those due now."""
        numbers = range(len(self._all)) if everything else self._turns[publication % len(self._turns)]
        return {number: _digest(self._all[number], self._mine[number]) for number in numbers if self._mine[number]}

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
