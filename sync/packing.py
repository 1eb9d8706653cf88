"""From local shards to buckets: where each byte of a rank's snapshot belongs in the stream.

Every trainer rank copies its own shards, and nothing else, into one flat *snapshot* in the wire dtype. Where one rank holds
everything its snapshot is the stream, and buckets are sent from it in place. Elsewhere a bucket is filled from the snapshots of
all ranks: no rank ever holds a full large tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, Strict, TypeAdapter, ValidationError

from weightlane.ckpt_engines import ManifestError, ProtocolError

from .manifest import ALIGNMENT_BYTES, Manifest
from .strips import Run, Window, copy_rows
from .tensor_spec import Held

_PART = "bucket packing"
_Place = Annotated[int, Field(ge=0, lt=2**63), Strict()]
_RUNS: TypeAdapter[list[tuple[int, int, int]]] = TypeAdapter(list[tuple[_Place, _Place, _Place]])


class RunTable:
    """The runs of one rank, in stream order."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = sorted(runs, key=lambda run: run.stream)
        self._starts = [run.stream for run in self.runs]
        self._windows: dict[tuple[int, int], Window] = {}

    @classmethod
    def of_shards(cls, shards: Sequence[Held], places: Sequence[int], manifest: Manifest) -> RunTable:
        """The runs of `shards`, which lie at `places` of the rank's snapshot."""
        offsets = {entry.spec.name: entry.offset for entry in manifest.entries}
        return cls(
            [
                Run(offsets[shard.spec.name] + shard.start * shard.spec.dtype.itemsize, place, shard.nbytes)
                for shard, place in zip(shards, places, strict=True)
                if shard.nbytes
            ]
        )

    def within(self, start: int, stop: int) -> Iterator[Run]:
        """The parts of this rank's runs that lie in the stream window [`start`, `stop`)."""
        first = max(0, bisect_right(self._starts, start) - 1)
        for run in self.runs[first:]:
            if run.stream >= stop:
                return
            low, high = max(run.stream, start), min(run.stream + run.nbytes, stop)
            if low < high:
                yield Run(low, run.snapshot + low - run.stream, high - low)

    def window(self, start: int, stop: int) -> Window:
        """How the runs of the stream window [`start`, `stop`) are copied; worked out once."""
        window = self._windows.get((start, stop))
        if window is None:
            window = self._windows[start, stop] = Window.of(self.within(start, stop))
        return window

    def bytes_within(self, start: int, stop: int) -> int:
        """How many bytes of the window this rank holds."""
        return self.window(start, stop).nbytes

    def snapshot_end(self, start: int, stop: int) -> int:
        """One past the last byte of the snapshot that is needed for the window."""
        return self.window(start, stop).snapshot_end

    def to_plain(self) -> list[list[int]]:
        """As JSON."""
        return [[run.stream, run.snapshot, run.nbytes] for run in self.runs]

    @classmethod
    def from_plain(cls, plain: Any) -> RunTable:
        """Parse another rank's table; `ProtocolError` for anything else."""
        try:
            return cls([Run(*run) for run in _RUNS.validate_python(plain)])
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ProtocolError(f"not a table of runs: {where}: {first['msg']}.", part=_PART) from None


def compact_places(shards: Sequence[Held]) -> list[int]:
    """First byte of each shard in a snapshot that holds nothing else, aligned."""
    places, place = [], 0
    for shard in shards:
        places.append(place)
        place += -(-shard.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places


def stream_places(shards: Sequence[Held], manifest: Manifest) -> list[int]:
    """First byte of each shard in a snapshot that is the stream itself: a rank that holds everything sends from it in place."""
    offsets = {entry.spec.name: entry.offset for entry in manifest.entries}
    return [offsets[shard.spec.name] + shard.start * shard.spec.dtype.itemsize for shard in shards]


def check_complete(manifest: Manifest, tables: Mapping[str, RunTable]) -> None:
    """Prove that the ranks together hold every byte of every tensor exactly once, or raise `ManifestError`."""
    held = sorted((run.stream, run.stream + run.nbytes, rank) for rank, table in tables.items() for run in table.runs)
    position = 0
    for entry in manifest.entries:
        covered = entry.offset
        while position < len(held) and held[position][0] < entry.end:
            start, stop, rank = held[position]
            if start != covered:
                kind = "held twice" if start < covered else "held by no rank"
                raise ManifestError(
                    f"byte {min(start, covered) - entry.offset} of {entry.spec.name} is {kind} (next holder: {rank}).",
                    part=_PART,
                    hint="The training engine's local_shards() must cover every tensor exactly once over all ranks.",
                )
            covered = stop
            position += 1
        if covered != entry.end:
            raise ManifestError(
                f"{entry.spec.name} is held only up to byte {covered - entry.offset} of {entry.spec.nbytes}.",
                part=_PART,
                hint="The training engine's local_shards() must cover every tensor exactly once over all ranks.",
            )


def copy_runs(snapshot: torch.Tensor, table: RunTable, start: int, stop: int, payload: torch.Tensor) -> None:
    """Copy what this rank holds of the window into its places in `payload` (uint8, window-sized)."""
    for strip in table.window(start, stop).strips:
        copy_rows(payload, strip.stream.moved(-start), snapshot, strip.snapshot)


def gather_runs(snapshot: torch.Tensor, table: RunTable, start: int, stop: int, packed: torch.Tensor) -> torch.Tensor:
    """What this rank holds of the window, back to back: in the snapshot, if it lies there so, else in `packed`."""
    window = table.window(start, stop)
    if window.unbroken:
        return snapshot[window.snapshot_end - window.nbytes : window.snapshot_end]
    for strip in window.strips:
        copy_rows(packed, strip.packed, snapshot, strip.snapshot)
    return packed[: window.nbytes]


def scatter_runs(packed: torch.Tensor, table: RunTable, start: int, stop: int, payload: torch.Tensor) -> None:
    """Undo `gather_runs` on the rank that fills the bucket."""
    for strip in table.window(start, stop).strips:
        copy_rows(payload, strip.stream.moved(-start), packed, strip.packed)
