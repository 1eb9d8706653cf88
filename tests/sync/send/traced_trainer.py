"""A trainer rank in a process of its own of which every allocation is on record, torch's and libc's as well as Python's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hop import Trainer
from slices import rows
from waiting import HANG_S

from weightlane.sync import Publisher, TensorSpec
from weightlane.sync.version.box import Box

BUCKET_BYTES = 2 << 20
SPECS = {
    "large": TensorSpec("large", (2048, 4096), torch.float32),  # 32 MiB
    "small": TensorSpec("small", (512, 512), torch.float32),
    "norm": TensorSpec("norm", (512,), torch.float32),
}
WORLD = 2


def strips(spec: TensorSpec, rank: int, world: int) -> list[Box]:
    """Several strips of rows, as ranks have of fused tensor-parallel parameters."""
    return [box for strip in range(rank, 16, world) for box in rows(spec, strip, 16)]


class TracedTrainer(Trainer):
    """Publishes versions when told to; when it is closed, everything that was allocated for them is in `record`."""

    def __init__(self, record: Path, **more: Any) -> None:
        import memray

        self._tracker = memray.Tracker(record)
        more |= {"cut": strips, "specs": SPECS, "bucket_bytes": BUCKET_BYTES}
        super().__init__(patience_s=HANG_S, **more)  # receivers that are slow would cost memory

    def make_publisher(self, *arguments: Any, **more: Any) -> Publisher:
        self._tracker.__enter__()
        return super().make_publisher(*arguments, **more)

    def publish(self, version: int) -> None:
        for shard in self.shards:
            shard.data.fill_(version)
        self.end.publish(version)
        self.end.fence()

    def close(self) -> None:
        self.end.close()
        self._tracker.__exit__(None, None, None)
