"""A snapshot of which the matrices are quantised on the way: the live parameters are read once, and one byte of each is kept.

Blocks that lie whole in a shard are quantised straight from the live parameters. Those that a cut between two ranks divides
have one scale, which depends on both: what a rank has of such blocks is copied as it is, so that parameters may change as soon
as they were read, and quantised when every rank has said how large its part is (`Leftovers.cuts`). With blocks of 128 x 128
that is at most 254 rows and 254 columns of each shard; where the rows of an int8 matrix are divided, it is all of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from weightlane.ckpt_engines import WeightlaneError

from ...codecs.quantised import QUANTISERS, Scheme
from ...codecs.quantised.quantisation import QuantisedPair, is_quantised, pair_of, scale_box
from ...version.box import Box
from ...version.tensor_spec import Held, HeldSlice, LocalShard
from .progress import Progress
from .quantised_blocks import CutBlocks, QuantisedMatrix, block_of, corner, regions_of
from .snapshot import Snapshot, runtime_of_shards
from .steps import Copy, Leftovers, Milestone, copies

_Key = tuple[str, Box]
_CHUNK_NUMEL = 4 << 20
"""Elements that are quantised, at most, before those who wait for them hear of it."""
_SAMPLED_ROWS = 16
"""Rows of each chunk of which the error is computed."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Whole blocks, or parts of some that are cut."""

    matrix: QuantisedMatrix
    box: Box
    is_cut: bool

    def run(self, memory: torch.Tensor, remains: Leftovers) -> None:
        matrix, box = self.matrix, self.box
        data = matrix.data(box)
        magnitudes = matrix.magnitudes(box, data)
        if self.is_cut:
            remains.cuts.append(CutBlocks(matrix, box, data.clone()))
            remains.magnitudes.append(magnitudes)
            return
        scales = matrix.quantiser.scales_of(magnitudes.values)
        quantised = matrix.put(memory, box, data, scales)
        few = slice(0, _SAMPLED_ROWS)
        height, _ = matrix.quantiser.block_shape(box.shape[1])
        bands = slice(0, -(-_SAMPLED_ROWS // height))
        remains.error += matrix.quantiser.report(data[few], quantised[few], scales[bands], at=corner(box))


class QuantisedShards:
    """What a rank holds of a quantised version.

    Args:
        shards: Of the parameters.
        scheme: What linear weights become.
    """

    def __init__(self, shards: Sequence[LocalShard], scheme: Scheme) -> None:
        self._shards = list(shards)
        self._scheme = scheme
        self.held: list[Held] = []
        """What it holds of the version's tensors."""
        for shard in shards:
            if not is_quantised(shard.spec):
                self.held.append(shard)
                continue
            pair = pair_of(shard.spec, scheme)
            differing = _differing(shard, pair, scheme) if shard.numel else None
            self.held.append(HeldSlice(pair.weight, shard.box, differing))
            self.held.append(HeldSlice(pair.scales, scale_box(pair, shard.box, scheme)))

    def snapshot(self, places: Sequence[int]) -> Snapshot:
        """Taken into memory where each of `held` begins at one of `places`."""
        return _QuantisedSnapshot(self._shards, dict(zip(map(_key, self.held), places, strict=True)), self._scheme)


class _QuantisedSnapshot(Snapshot):
    """See the module's docstring. How far it has read is counted in steps."""

    def __init__(self, shards: Sequence[LocalShard], places: Mapping[_Key, int], scheme: Scheme) -> None:
        super().__init__([], [])
        self.runtime = runtime_of_shards(shards)
        self._stream = self.runtime.new_stream()
        self._workers = 1  # steps add to `Leftovers`
        plain: list[tuple[int, LocalShard]] = []
        steps: list[tuple[int, Copy | _Step]] = []
        """The first byte that it makes, and the step; in the order of the elements."""
        for shard in shards:
            if is_quantised(shard.spec):
                steps += _steps(shard, places, scheme)
            else:
                plain.append((places[_key(shard)], shard))
        plain.sort(key=lambda placed: placed[0])
        steps += [(copy.start, copy) for copy in copies(plain)]
        steps.sort(key=lambda step: step[0])
        self.nbytes = max(
            (places[_key(held)] + held.nbytes for held in QuantisedShards(shards, scheme).held), default=0
        )
        missing = accumulate((start for start, _ in reversed(steps)), min, initial=self.nbytes)
        """The first byte that is not there yet, by how many steps are left."""
        done = list(missing)[-2::-1]
        self._milestones = [
            Milestone(step, until, number) for number, ((_, step), until) in enumerate(zip(steps, done, strict=True), 1)
        ]
        self.is_cut = any(isinstance(step, _Step) and step.is_cut for _, step in steps)
        self.read_end = len(steps)
        self.ends = {}
        for number, (_, step) in enumerate(steps, 1):
            if not isinstance(step, Copy):
                self.ends[step.matrix.name] = number
        starts = [(copy.start, number) for number, (_, copy) in enumerate(steps, 1) if isinstance(copy, Copy)]
        for place, shard in plain:
            self.ends[shard.spec.name] = max(
                (number for start, number in starts if start < place + shard.nbytes), default=0
            )

    def take(
        self,
        memory: torch.Tensor,
        after: Any,
        progress: Progress,
        remains: Leftovers | None = None,
    ) -> None:
        """As `Snapshot.take`. A version that cannot be quantised fails alone: parameters may change then."""
        try:
            super().take(memory, after, progress, remains)
        except WeightlaneError:
            progress.advance(progress.done_bytes, self.read_end)
            raise

    def _tell(self, done_bytes: int, read: int, progress: Progress) -> None:
        progress.advance(done_bytes, read)


def _key(held: Held) -> _Key:
    return held.spec.name, held.box


def _differing(shard: LocalShard, pair: QuantisedPair, scheme: Scheme) -> Callable[[torch.Tensor], float] | None:
    """What becomes of one block, or of some rows, compared with what became of it: see `HeldSlice.differing`.

    None where every row of an int8 matrix is divided: too much of a scale is not known here.
    """
    quantiser, regions = QUANTISERS[scheme], list(regions_of(shard.box, pair, scheme))
    whole = [box for box, is_cut in regions if not is_cut]
    if scheme == "int8" and not whole:
        return None
    region = max(whole, key=lambda box: box.numel) if whole else regions[0][0]
    sample = _middle(region, (_SAMPLED_ROWS, pair.weight.shape[1]) if scheme == "int8" else block_of(pair, scheme))
    inside = sample.within(shard.box).index

    def differing(old: torch.Tensor) -> float:
        data = shard.data.detach()[inside]
        scales = quantiser.scales_of(quantiser.magnitudes(data, at=corner(sample)))
        new = quantiser.quantise(data, scales, at=corner(sample))
        differ = new.to(old.device).view(torch.uint8) != old.view(shard.box.shape)[inside].contiguous().view(
            torch.uint8
        )
        return int(torch.count_nonzero(differ)) / differ.numel()

    return differing


def _middle(box: Box, size: tuple[int, int]) -> Box:
    """About the middle one of the parts of `box`, `size` large, that begin at a border between them."""
    starts = tuple(
        start + (count // most // 2) * most for start, count, most in zip(box.starts, box.shape, size, strict=True)
    )
    return Box(starts, tuple(min(most, stop - at) for at, stop, most in zip(starts, box.stops, size, strict=True)))


def _steps(shard: LocalShard, places: Mapping[_Key, int], scheme: Scheme) -> Iterator[tuple[int, _Step]]:
    pair = pair_of(shard.spec, scheme)
    own = scale_box(pair, shard.box, scheme)
    matrix = QuantisedMatrix(shard, pair, scheme, places[_key(shard)], places[pair.scales.name, own])
    height, _ = block_of(pair, scheme)
    for region, is_cut in regions_of(shard.box, pair, scheme):
        rows = max(_CHUNK_NUMEL // region.shape[1] // height, 1) * height
        for first in range(0, region.shape[0], rows):
            starts = (region.starts[0] + first, region.starts[1])
            box = Box(starts, (min(rows, region.shape[0] - first), region.shape[1]))
            yield matrix.first_byte(box), _Step(matrix, box, is_cut)
