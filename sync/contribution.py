"""What one trainer rank contributes to the stream of a version, and the snapshot it does so from."""

from __future__ import annotations

from collections.abc import Sequence

from .config import Quantise
from .manifest import Manifest
from .packing import RunTable, compact_places, stream_places
from .quantisation import wire_specs
from .quantised_snapshot import QuantisedShards
from .snapshot import Snapshot
from .tensor_spec import Held, LocalShard, TensorSpec


class Contribution:
    """Of a rank that holds `shards`.

    Args:
        specs: Every tensor of the checkpoint.
        shards: What the rank holds.
        quantise: What linear weights become; see `SyncConfig`.

    Raises:
        ConfigError: Nothing can be quantised, or not as it is sharded.
    """

    def __init__(self, specs: Sequence[TensorSpec], shards: Sequence[LocalShard], quantise: Quantise) -> None:
        self._shards = shards
        self._quantised: QuantisedShards | None = None
        self.specs = tuple(specs)
        """Every tensor of the stream."""
        self.held: Sequence[Held] = shards
        """What the rank holds of them."""
        if quantise != "none":
            self._quantised = QuantisedShards(shards, quantise)
            self.specs = tuple(wire_specs(specs, quantise))
            self.held = self._quantised.held
        self._scheme = "" if quantise == "none" else quantise
        self.numel = sum(run.numel for run in self.held)
        """Elements that it sends."""

    def layout(self, bucket_bytes: int, *, whole_tensors: bool, sealed: bool, lasting: bool) -> Manifest:
        """Of all ranks' versions that are sent in full; see `Manifest`."""
        return Manifest(
            0,
            self.specs,
            bucket_bytes,
            whole_tensors=whole_tensors,
            sealed=sealed,
            lasting=lasting,
            quantised=self._scheme,
        )

    def places(self, layout: Manifest, *, in_place: bool) -> list[int]:
        """First byte of each of `held` in the snapshot, which is the stream itself if that is sent `in_place`."""
        return stream_places(self.held, layout) if in_place else compact_places(self.held)

    def snapshot(self, places: Sequence[int]) -> Snapshot:
        """Taken into such places."""
        return Snapshot(self._shards, places) if self._quantised is None else self._quantised.snapshot(places)

    def table(self, places: Sequence[int], layout: Manifest) -> RunTable:
        """Where those belong in the stream."""
        return RunTable.of_shards(self.held, places, layout)
