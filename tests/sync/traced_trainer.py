"""A trainer rank in a process of its own of which every allocation is on record, torch's and libc's as well as Python's."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import CheckpointEngineRegistry
from weightlane.sync import LocalShard, Placement, Publisher, TensorSpec
from weightlane.sync.boxes import Box

BUCKET_BYTES = 2 << 20
SPECS = [
    TensorSpec("large", (4096, 4096), torch.float32),  # 64 MiB
    TensorSpec("small", (512, 512), torch.float32),
    TensorSpec("norm", (512,), torch.float32),
]
WORLD = 2


def held(cut: str, rank: int) -> list[tuple[TensorSpec, Box]]:
    """A half of each tensor: of its `rows`, of its `columns`, or every other row (`interleaved`)."""
    slices = []
    for spec in SPECS:
        axis = len(spec.shape) - 1 if cut == "columns" else 0
        half = spec.shape[axis] // WORLD
        if (
            cut == "interleaved" and len(spec.shape) > 1
        ):  # in 16 strips, as fused parameters of tensor-parallel ranks are
            strip = spec.shape[0] // 16
            first = range(rank * strip, spec.shape[0], WORLD * strip)
            slices += [(spec, Box((start, 0), (strip, spec.shape[1]))) for start in first]
            continue
        starts, shape = [0] * len(spec.shape), list(spec.shape)
        starts[axis], shape[axis] = rank * half, half
        slices.append((spec, Box(tuple(starts), tuple(shape))))
    return slices


def serve(
    pipe: Connection,
    rendezvous: dict[str, Any],
    engine: str,
    options: dict[str, Any],
    cut: str,
    rank: int,
    record: Path,
) -> None:
    """Publish versions when told to; at the end, write everything that was allocated meanwhile to `record`."""
    import memray

    torch.set_num_threads(1)
    shards = [LocalShard(spec, box.starts, torch.zeros(box.shape)) for spec, box in held(cut, rank)]
    placements = [Placement.of(held(cut, other)) for other in range(WORLD)]
    transport = CheckpointEngineRegistry().create(engine, options)
    with memray.Tracker(record):
        publisher = Publisher(
            f"trainer-{rank}",
            rendezvous,
            rank=rank,
            placements=placements,
            shards=shards,
            engine=transport,
            bucket_bytes=BUCKET_BYTES,
        )
        pipe.send("ready")
        while (version := pipe.recv()) is not None:
            for shard in shards:
                shard.data.fill_(version)
            publisher.publish(version)
            publisher.fence()
            pipe.send("published")
        publisher.close()
    pipe.send("recorded")
