"""The sender's side of a delta: large tensors in pieces, by several threads, while the snapshot is being taken."""

from __future__ import annotations

from contextlib import closing

import torch

from weightlane.sync import IncomingDelta, LocalShard, Manifest, StagedDelta, TensorSpec
from weightlane.sync.codecs.delta.encoding import DeltaEncoder, RankDelta, delta_manifest
from weightlane.sync.version.packing import snapshot_slices

SPECS = (
    TensorSpec("large", (9, 1_000_000), torch.uint8),
    TensorSpec("small", (5,), torch.float32),
    TensorSpec("scalar", (), torch.float32),
)
LAYOUT = Manifest(1, SPECS, 16 << 20, identity="t/1")
PLACES = [entry.offset for entry in LAYOUT.entries]
SHARDS = [LocalShard.whole(spec, torch.zeros(spec.shape, dtype=spec.dtype)) for spec in SPECS]
PARTS = snapshot_slices(SHARDS, PLACES, LAYOUT.regions)


def test_what_several_threads_have_encoded_in_pieces_leads_to_the_new_version() -> None:
    base = torch.randint(0, 256, (LAYOUT.total_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    new = base.clone()
    new[::100] ^= 1
    asked: list[int] = []
    wire = torch.empty(0, dtype=torch.uint8)
    with closing(DeltaEncoder(SHARDS, PLACES)) as encoder:
        delta = encoder.encode(PARTS, base, new, asked.append, lambda: True, wire.resize_)
    assert isinstance(delta, RankDelta)
    assert asked == sorted(asked), "later parts of the snapshot are waited for before earlier ones are encoded"
    assert [segment.tensor for segment in delta.segments] == [0, 0, 1, 2], "a large tensor goes in pieces"
    manifest = delta_manifest(LAYOUT, 2, (1, "t/1"), "t/2", [delta.segments])
    StagedDelta.of(IncomingDelta(manifest, iter(wire.split(100_000)).__next__)).swap(LAYOUT.views(base))
    assert all(torch.equal(tensor, LAYOUT.views(new)[name]) for name, tensor in LAYOUT.views(base).items())
    assert delta.changed == 90_000 + 1  # one of the small tensors' bytes is a multiple of a hundred
