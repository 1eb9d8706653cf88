"""`ReplicatedShards`: trainer ranks that hold the same elements compare digests of them, which must be equal.

Only one rank sends each element, so data-parallel replicas that have diverged would otherwise go unnoticed. Therefore every rank
computes digests of its replicated slices before its snapshot, while no parameter changes. Until a version has committed it
digests all of these slices. Afterwards it digests a few for each version, in turn, at low cost. Rank 0 compares the digests
before it offers the version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import ManifestError

from ...plan import ReplicatedSlice
from ...version.box import Box
from ...version.bucket_checksums import checksum_of
from ...version.tensor_spec import LocalShard, TensorSpec, raw_bytes
from .topics import DIGESTS

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

    Args:
        replicated: All such slices, in the same order on every rank.
        shards: This rank's shards.
    """

    def __init__(self, replicated: Sequence[ReplicatedSlice], shards: Sequence[LocalShard]) -> None:
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


def _in_turns(slices: Sequence[ReplicatedSlice]) -> list[list[int]]:
    """Divide the slices into groups of about `_BUDGET_BYTES`; versions digest one group each, in turn. Returns their numbers."""
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
