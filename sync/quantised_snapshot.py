"""A snapshot of which the matrices are quantised on the way: the live parameters are read once, and one byte of each is kept.

Rows of blocks that lie whole in a shard are quantised straight from the live parameters. Those that a cut between two ranks
divides have one scale, which depends on both: such rows are copied as they are, so that parameters may change as soon as they
were read, and quantised when every rank has said how large its part is (`Remains.cuts`). That is at most 254 rows of each shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from weightlane.ckpt_engines import WeightlaneError

from .boxes import Box
from .codecs.quantised import QuantisationReport, Scheme, block_fp8, channel_int8
from .progress import Progress
from .quantisation import QuantisedPair, is_quantised, pair_of, scale_box
from .snapshot import Copy, Milestone, Remains, Snapshot, copies, side_stream
from .tensor_spec import Held, HeldSlice, LocalShard

_Key = tuple[str, Box]
_BAND = block_fp8.BLOCK
_CHUNK_NUMEL = 4 << 20
"""Elements that are quantised, at most, before those who wait for them hear of it."""
_SAMPLED_ROWS = 16
"""Rows of each chunk of which the error is computed."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a matrix that a rank holds, and where in the snapshot they go."""

    pair: QuantisedPair
    live: torch.Tensor
    """The shard's elements, in the trainer's dtype."""
    first: int
    """Their first row in the matrix."""
    weight_place: int
    """First byte of their elements."""
    scale_place: int
    """First byte of the scales that are this rank's to send."""

    @property
    def columns(self) -> int:
        return self.pair.weight.shape[1]

    @property
    def count(self) -> int:
        return self.live.numel() // self.columns

    @property
    def end(self) -> int:
        return self.first + self.count

    def data(self, start: int, stop: int) -> torch.Tensor:
        """Rows of the matrix, as they are now."""
        return self.live.detach().reshape(-1, self.columns)[start - self.first : stop - self.first]

    def place(self, row: int) -> int:
        return self.weight_place + (row - self.first) * self.columns

    def elements(self, memory: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Where quantised rows of the matrix go."""
        flat = memory[self.place(start) : self.place(stop)].view(self.pair.weight.dtype)
        return flat.view(-1, self.columns)

    def put(
        self, memory: torch.Tensor, start: int, stop: int, quantise: Callable[[torch.Tensor | None], torch.Tensor]
    ) -> torch.Tensor:
        """Have rows quantised to where they go, or on the device where they are, and copied. Returns what came out."""
        out = self.elements(memory, start, stop)
        if out.device == self.live.device:
            return quantise(out)
        quantised = quantise(None)
        out.copy_(quantised, non_blocking=True)
        return quantised

    def put_scales(self, memory: torch.Tensor, scales: torch.Tensor, after: int) -> None:
        """Put rows of scales behind `after` others that this rank sends."""
        place = self.scale_place + after * scales.shape[1] * scales.element_size()
        memory[place : place + scales.nbytes].view(torch.float32).copy_(scales.view(-1), non_blocking=True)

    def bands_before(self, row: int) -> int:
        """How many whole rows of blocks, of those whose scales this rank sends, lie before that of `row`."""
        return row // _BAND - -(-self.first // _BAND)


@dataclass(frozen=True, slots=True)
class CutRows:
    """Rows of one row of blocks of which this rank holds a part, as they were."""

    rows: _Rows
    start: int
    """First of them in the matrix."""
    data: torch.Tensor
    """[n, columns]."""
    amax: torch.Tensor
    """float32 [1, blocks]: the largest magnitude in each block, as far as they tell."""

    @property
    def key(self) -> tuple[str, int]:
        """The matrix, and the row of blocks."""
        return self.rows.pair.weight.name, self.start // _BAND

    def quantise(self, amax: torch.Tensor, memory: torch.Tensor) -> QuantisationReport:
        """Put them into the snapshot, `amax` being that of the whole blocks. Returns the error."""
        rows, stop, scales = self.rows, self.start + self.data.shape[0], block_fp8.scales_of(amax)
        name = rows.pair.weight.name
        quantised = block_fp8.quantise(self.data, self.start, scales, name=name)
        rows.elements(memory, self.start, stop).copy_(quantised)
        if self.start % _BAND == 0:  # the rank that has a block's first row sends its scale
            rows.put_scales(memory, scales, rows.bands_before(self.start))
        return block_fp8.report(self.data, quantised, self.start, scales)


@dataclass(frozen=True, slots=True)
class _Fp8Step:
    """Whole rows of blocks, or a part of one that is cut."""

    rows: _Rows
    start: int
    stop: int

    def run(self, memory: torch.Tensor, remains: Remains) -> None:
        rows, name = self.rows, self.rows.pair.weight.name
        data = rows.data(self.start, self.stop)
        amax = block_fp8.block_amax(data, self.start, name=name)
        if _is_cut(rows.pair, self.start, self.stop):
            remains.cuts.append(CutRows(rows, self.start, data.clone(), amax))
            return
        scales = block_fp8.scales_of(amax)
        quantised = rows.put(
            memory,
            self.start,
            self.stop,
            lambda out: block_fp8.quantise(data, self.start, scales, name=name, out=out),
        )
        rows.put_scales(memory, scales, rows.bands_before(self.start))
        few = slice(0, _SAMPLED_ROWS)
        remains.error += block_fp8.report(data[few], quantised[few], self.start, scales[:1])


@dataclass(frozen=True, slots=True)
class _Int8Step:
    """Some rows."""

    rows: _Rows
    start: int
    stop: int

    def run(self, memory: torch.Tensor, remains: Remains) -> None:
        rows, name = self.rows, self.rows.pair.weight.name
        data = rows.data(self.start, self.stop)
        scales = channel_int8.scales_of(channel_int8.channel_amax(data, name=name))
        quantised = rows.put(
            memory, self.start, self.stop, lambda out: channel_int8.quantise(data, scales, name=name, out=out)
        )
        rows.put_scales(memory, scales, self.start - rows.first)
        few = slice(0, _SAMPLED_ROWS)
        remains.error += channel_int8.report(data[few], quantised[few], scales[few])


class QuantisedShards:
    """What a rank holds of a quantised version.

    Args:
        shards: Of the parameters.
        scheme: What linear weights become.

    Raises:
        ConfigError: A shard is not made of whole rows.
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
            scales = HeldSlice(pair.scales, scale_box(pair, shard.box, scheme))
            _, count = _rows_of(shard)
            differing = _differing(shard, scheme) if count else None
            self.held += [HeldSlice(pair.weight, shard.box, differing), scales]

    def snapshot(self, places: Sequence[int]) -> Snapshot:
        """Taken into memory where each of `held` begins at one of `places`."""
        return _QuantisedSnapshot(self._shards, dict(zip(map(_key, self.held), places, strict=True)), self._scheme)


class _QuantisedSnapshot(Snapshot):
    """See the module's docstring. How far it has read is counted in steps."""

    def __init__(self, shards: Sequence[LocalShard], places: Mapping[_Key, int], scheme: Scheme) -> None:
        super().__init__([], [])
        self._stream = side_stream(shards)
        self._workers = 1  # steps add to `Remains`
        plain: list[tuple[int, LocalShard]] = []
        steps: list[tuple[int, int, Copy | _Fp8Step | _Int8Step]] = []
        """First byte that it makes, first byte of the scales that it makes, and the step."""
        for shard in shards:
            if is_quantised(shard.spec):
                steps += _steps(shard, places, scheme)
            else:
                plain.append((places[_key(shard)], shard))
        plain.sort(key=lambda placed: placed[0])
        steps += [(copy.start, copy.start, copy) for copy in copies(plain)]
        steps.sort(key=lambda step: step[0])
        self.nbytes = max(
            (places[_key(held)] + held.nbytes for held in QuantisedShards(shards, scheme).held), default=0
        )
        missing = accumulate((min(step[:2]) for step in reversed(steps)), min, initial=self.nbytes)
        """The first byte that is not there yet, by how many steps are left."""
        done = list(missing)[-2::-1]
        self._milestones = [
            Milestone(step, until, number)
            for number, ((*_, step), until) in enumerate(zip(steps, done, strict=True), 1)
        ]
        self.is_cut = any(
            isinstance(step, _Fp8Step) and _is_cut(step.rows.pair, step.start, step.stop) for *_, step in steps
        )
        self.read_end = len(steps)
        self.ends = {}
        for number, (*_, step) in enumerate(steps, 1):
            if not isinstance(step, Copy):
                self.ends[step.rows.pair.weight.name] = number
        starts = [(copy.start, number) for number, (*_, copy) in enumerate(steps, 1) if isinstance(copy, Copy)]
        for place, shard in plain:
            self.ends[shard.spec.name] = max(
                (number for start, number in starts if start < place + shard.nbytes), default=0
            )

    def take(
        self,
        memory: torch.Tensor,
        after: torch.cuda.Event | None,
        progress: Progress,
        remains: Remains | None = None,
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


def _rows_of(shard: LocalShard) -> tuple[int, int]:
    """First row and number of rows."""
    return shard.starts[0], shard.box.shape[0] if shard.numel else 0


def _differing(shard: LocalShard, scheme: Scheme) -> Callable[[torch.Tensor], float]:
    """What becomes of one block, or of some rows, compared with what became of it: see `HeldSlice.differing`."""
    first, count = _rows_of(shard)
    columns = shard.spec.shape[1]
    bands = [(start, stop) for start, stop in _bands(first, first + count) if stop - start == _BAND]
    start, stop = (bands or [next(_bands(first, first + count))])[len(bands) // 2]
    left = columns // _BAND // 2 * _BAND
    if scheme == "int8":
        stop, left = start + min(_SAMPLED_ROWS, stop - start), 0
    right = min(left + _BAND, columns) if scheme == "fp8" else columns

    def differing(old: torch.Tensor) -> float:
        data = shard.data.detach().reshape(count, columns)[start - first : stop - first, left:right]
        if scheme == "fp8":
            scales = block_fp8.scales_of(block_fp8.block_amax(data, start))
            new = block_fp8.quantise(data, start, scales)
        else:
            new = channel_int8.quantise(data, channel_int8.scales_of(channel_int8.channel_amax(data)))
        before = old.view(count, columns)[start - first : stop - first, left:right]
        differ = new.to(old.device).view(torch.uint8) != before.contiguous().view(torch.uint8)
        return int(torch.count_nonzero(differ)) / differ.numel()

    return differing


def _bands(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Runs of rows that are cut at the borders of blocks."""
    while start < stop:
        end = min(stop, (start // _BAND + 1) * _BAND)
        yield start, end
        start = end


def _is_cut(pair: QuantisedPair, start: int, stop: int) -> bool:
    """Whether the rows end, on either side, inside a block that goes on there."""
    return start % _BAND > 0 or (stop % _BAND > 0 and stop < pair.weight.shape[0])


def _steps(
    shard: LocalShard, places: Mapping[_Key, int], scheme: Scheme
) -> Iterator[tuple[int, int, _Fp8Step | _Int8Step]]:
    pair = pair_of(shard.spec, scheme)
    first, _ = _rows_of(shard)
    own, width = scale_box(pair, shard.box, scheme), pair.scales.shape[1]
    scale_place = places[pair.scales.name, own]
    rows = _Rows(pair, shard.data, first, places[_key(shard)], scale_place)
    kind, per = (_Fp8Step, _BAND) if scheme == "fp8" else (_Int8Step, 1)
    chunk = max(_CHUNK_NUMEL // rows.columns // per, 1) * per
    start = first
    while start < rows.end:
        stop = min(start + chunk, rows.end)
        if scheme == "fp8":
            band_end = next(_bands(start, stop))[1]
            if _is_cut(pair, start, band_end):
                stop = band_end
            else:  # up to the last border, if the last rows are cut
                last = stop // _BAND * _BAND
                stop = last if last > start and _is_cut(pair, last, stop) else stop
        begun = start - first if scheme == "int8" else -(-start // _BAND) - own.starts[0]
        yield rows.place(start), scale_place + begun * width * pair.scales.dtype.itemsize, kind(rows, start, stop)
        start = stop
