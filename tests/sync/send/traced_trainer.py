"""A trainer rank in a process of its own of which every allocation is on record, torch's and libc's as well as Python's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from direct_hop import rows
from waiting import HANG_S

from weightlane.ckpt_engines import CheckpointEngineRegistry
from weightlane.sync import LocalShard, Placement, Publisher, TensorSpec
from weightlane.sync.send import snapshotter
from weightlane.sync.version.box import Box

BUCKET_BYTES = 2 << 20
SPECS = {
    "large": TensorSpec("large", (2048, 4096), torch.float32),  # 32 MiB
    "small": TensorSpec("small", (512, 512), torch.float32),
    "norm": TensorSpec("norm", (512,), torch.float32),
}
WORLD = 2


def interleaved(spec: TensorSpec, rank: int, world: int) -> list[Box]:
    """Strips, as fused parameters of tensor-parallel ranks are."""
    return [box for strip in range(rank, 16, world) for box in rows(spec, strip, 16)]


class TracedTrainer:
    """Publishes versions when told to; when it is closed, everything that was allocated meanwhile is in `record`."""

    def __init__(self, rendezvous: dict[str, Any], rank: int, record: Path) -> None:
        import memray

        snapshotter._PATIENCE_S = HANG_S  # receivers that are slow would cost memory
        held = [[(spec, interleaved(spec, other, WORLD)) for spec in SPECS.values()] for other in range(WORLD)]
        self._shards = [
            LocalShard(spec, box.starts, torch.zeros(box.shape)) for spec, boxes in held[rank] for box in boxes
        ]
        transport = CheckpointEngineRegistry().create("gloo", {})
        self._tracker = memray.Tracker(record)
        self._tracker.__enter__()
        self._publisher = Publisher(
            f"trainer-{rank}",
            rendezvous,
            rank=rank,
            placements=[Placement.of_boxes(each) for each in held],
            shards=self._shards,
            engine=transport,
            bucket_bytes=BUCKET_BYTES,
            deadline_s=HANG_S,
        )

    def publish(self, version: int) -> None:
        for shard in self._shards:
            shard.data.fill_(version)
        self._publisher.publish(version)
        self._publisher.fence()

    def close(self) -> None:
        self._publisher.close()
        self._tracker.__exit__(None, None, None)
