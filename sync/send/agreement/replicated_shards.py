"""Whether trainer ranks that hold the same elements hold equal ones.

Data-parallel copies that have drifted apart would go unnoticed otherwise, since each element is sent by one of them. So every
rank computes digests of what others hold as well, before its snapshot, while no parameter changes: of everything until a version
has committed, then of a part for each version, so that it costs next to nothing and all is looked at again and again. The
digests are compared before the version is offered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightlane.ckpt_engines import Deadline, ManifestError, ProtocolError

from ...plan import Replicated
from ...version.box import Box
from ...version.bucket_checksums import checksum_of
from ...version.tensor_spec import LocalShard, TensorSpec, raw_bytes
from .rank_agreement import AgreementMailbox, RankAgreement

_PART = "replica check"
_BUDGET_BYTES = 4 << 20
"""What is read for one version after the first: half a millisecond."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """A slice that several ranks hold."""

    number: int
    """Its place among all such slices, the same on every rank."""
    spec: TensorSpec
    box: Box
    parts: tuple[tuple[Box, torch.Tensor], ...]
    """What this rank has of it, and where in it."""

    @torch.no_grad()
    def digest(self) -> str:
        """Of its elements as they would be sent."""
        if len(self.parts) == 1:
            wire = self.parts[0][1].to(self.spec.dtype).contiguous()
        else:
            wire = torch.empty(self.box.shape, dtype=self.spec.dtype, device=self.parts[0][1].device)
            for box, part in self.parts:
                wire[box.index] = part.to(self.spec.dtype)
        return checksum_of(raw_bytes(wire))


class ReplicaCheck:
    """Of one rank.

    Args:
        replicated: What more than one rank holds.
        shards: What this rank holds.
    """

    def __init__(self, replicated: Sequence[Replicated], shards: Sequence[LocalShard]) -> None:
        held: dict[str, list[LocalShard]] = defaultdict(list)
        for shard in shards:
            held[shard.spec.name].append(shard)
        self._all = list(replicated)
        self._mine: dict[int, _Slice] = {}
        for number, each in enumerate(replicated):
            parts = tuple(
                (common.within(each.box), shard.data[common.within(shard.box).index])
                for shard in held[each.spec.name]
                if (common := each.box.intersect(shard.box)) is not None
            )
            if parts:
                self._mine[number] = _Slice(number, each.spec, each.box, parts)
        self._turns = _in_turns(self._all)

    @property
    def needed(self) -> bool:
        """Whether anything is held by several ranks, this one or others."""
        return bool(self._all)

    def digests(self, publication: int, *, everything: bool) -> dict[int, str]:
        """Digests by slice: of all that this rank holds, or of those whose turn it is at this number of a publication."""
        numbers = range(len(self._all)) if everything else self._turns[publication % len(self._turns)]
        return {number: self._mine[number].digest() for number in numbers if number in self._mine}

    def compare(self, said: Mapping[str, Mapping[int, str]], version: int) -> None:
        """`ManifestError` that names the first slice of which two ranks have different values; `said` is by rank."""
        first: dict[int, tuple[str, str]] = {}
        for rank, digests in said.items():
            for number, digest in digests.items():
                other, theirs = first.setdefault(number, (rank, digest))
                if digest != theirs:
                    each = self._all[number]
                    raise ManifestError(
                        f"version {version}: {other} and {rank} hold different values of {each.spec.name}"
                        f" {[list(each.box.starts), list(each.box.shape)]}, which must be equal.",
                        part=_PART,
                        peer=rank,
                        hint="Data-parallel copies have drifted apart: look for a gradient that is not reduced over all of them,"
                        " or restart from a saved state.",
                    )


def _in_turns(slices: Sequence[Replicated]) -> list[list[int]]:
    """Which of them are looked at together."""
    turns: list[list[int]] = [[]]
    nbytes = 0
    for number, each in enumerate(slices):
        size = each.box.numel * each.spec.dtype.itemsize
        if turns[-1] and nbytes + size > _BUDGET_BYTES:
            turns.append([])
            nbytes = 0
        turns[-1].append(number)
        nbytes += size
    return turns


class ReplicaAgreement:
    """What the ranks of a session tell each other of it.

    Args:
        board: Private to the session.
        names: The ranks' publishers, in rank order.
        rank: This rank.
        check: This rank's.
    """

    def __init__(self, board: AgreementMailbox, names: Sequence[str], rank: int, check: ReplicaCheck) -> None:
        self._names = list(names)
        self._talk = RankAgreement(board, names, rank, _PART)
        self._check = check

    def close(self) -> None:
        """The session is over: whoever waits need not any more. Idempotent."""
        self._talk.close()

    def look_again(self) -> None:
        """As `RankAgreement.look_again`."""
        self._talk.look_again()

    def say(self, version: int, digests: Mapping[int, str]) -> None:
        """This rank's digests."""
        self._talk.say(version, sorted(digests.items()))

    def hear(self, version: int, deadline: Deadline, wanted: Callable[[], bool]) -> None:
        """Compare those of all ranks. Raises `ManifestError`, or as `RankAgreement.hear`."""
        said = self._talk.hear(version, deadline, wanted)
        self._check.compare({name: _parsed(each) for name, each in zip(self._names, said, strict=True)}, version)


def _parsed(said: Any) -> dict[int, str]:
    try:
        return {int(number): str(digest) for number, digest in said}
    except (TypeError, ValueError) as cause:
        raise ProtocolError(f"not a list of digests: {cause}.", part=_PART) from None
