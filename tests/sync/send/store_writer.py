"""Publishes versions of `tensors_of` into a store, as a trainer's sending rank does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from waiting import HANG_S

from weightlane.ckpt_engines import CheckpointEngineRegistry, Deadline, Topology
from weightlane.ckpt_engines.links.sender_link import make_sender_link
from weightlane.ckpt_engines.runtime.devices import HOST, runtime_of
from weightlane.sync import LocalShard, Manifest, Rendezvous, TensorSpec
from weightlane.sync.send.bucket_source import SnapshotBuckets
from weightlane.sync.send.pipeline import Destination, SendPipeline
from weightlane.sync.send.snapshot.progress import Progress, SourceBytes
from weightlane.sync.send.snapshot.send_memory import PackingBuffers
from weightlane.sync.send.snapshot.snapshot import Snapshot
from weightlane.sync.version.bucket_checksums import StoredChecksums
from weightlane.sync.version.packing import CopyTable, stream_places
from weightlane.sync.version.snapshot_slices import snapshot_slices


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes: one larger than a bucket, one empty, one scalar."""
    generator = torch.Generator().manual_seed(version)
    return {
        "embedding": torch.randn(40, 64, generator=generator).bfloat16(),
        "norm": torch.randn(7, generator=generator),
        "big": torch.randn(50, 100, generator=generator),
        "flags": torch.randint(0, 2, (13,), generator=generator).bool(),
        "scale": torch.tensor(float(version)),
        "empty": torch.zeros(0, 5),
    }


class Writer:
    """One session of a sending rank that holds everything."""

    def __init__(self, options: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], session: str = "s-1") -> None:
        specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
        self.layout = Manifest(0, specs, 4096, whole_tensors=True)
        self.sender = make_sender_link(CheckpointEngineRegistry().create("filesystem", options), "trainer-0", HOST)
        self.topology = Topology(session, {"trainer-0": self.sender.address()}, {})
        self._rendezvous = Rendezvous.host()
        checksums = StoredChecksums(self._rendezvous.mailbox(session))
        self.pipeline = SendPipeline([self.sender], runtime_of(HOST), checksums)
        self.pipeline.connect(self.topology, Deadline.after(HANG_S))

    def send(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        shards = [LocalShard.whole(spec, tensors[spec.name]) for spec in self.layout.specs]
        places, progress = stream_places(shards, self.layout), Progress("a snapshot", "writer")
        assert places is not None
        snapshot = Snapshot.of(shards, places)
        memory = torch.zeros(self.layout.total_bytes, dtype=torch.uint8)
        snapshot.take(memory, None, progress)
        deadline = Deadline.after(HANG_S)
        table = CopyTable.of(snapshot_slices(shards, places, self.layout.regions), self.layout)
        source = SourceBytes(memory, progress, deadline)
        buckets = SnapshotBuckets(source, table, self.layout, PackingBuffers(None, HOST))
        nobody = Destination(self.sender, [])
        everything = dict.fromkeys(range(self.layout.bucket_count), nobody)
        self.pipeline.send_version(replace(self.layout, version=version), buckets, everything, deadline)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        self.send(version, tensors_of(version) if tensors is None else tensors)
        self.pipeline.committing(version)(version, Deadline.after(HANG_S))

    def close(self) -> None:
        self.sender.close()
        self.pipeline.close()


def write(path: str) -> Writer:
    """Commit versions 1 and 2, send 3."""
    writer = Writer({"path": path}, tensors_of(0))
    for version in (1, 2):
        writer.publish(version)
    writer.send(3, tensors_of(3))
    return writer
