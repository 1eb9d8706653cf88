"""Measures the overhead of many small tensors: packing and committing them, beside a memcpy of the same bytes.

    python benchmarks/small_tensors.py [--tensors 10000] [--bytes 4096] [--rounds 15] [--json FILE]

One thread, one process, bfloat16, each tensor in memory of its own. The ways follow one another in every round, in changing
order, after two rounds that are not counted; memcpy is libc's, in one piece. The results are compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightlane.rollout.layout import CommitPlan, LayoutMap, SourceSpec, trace_loading
from weightlane.sync import LocalShard, Manifest, TensorSpec
from weightlane.sync.send.snapshot.progress import Progress
from weightlane.sync.send.snapshot.snapshot import Snapshot
from weightlane.sync.version.packing import (
    CopyTable,
    compact_places,
    copy_runs,
    gather_runs,
    scatter_runs,
    stream_places,
)
from weightlane.sync.version.snapshot_slices import snapshot_slices

TARGET = 2.0
"""Most that each way may take, in memcpys."""
BUCKET_BYTES = 16 << 20


class Live(torch.nn.Module):
    """A model of so many vectors, loaded one by one."""

    def __init__(self, specs: list[TensorSpec]) -> None:
        super().__init__()
        for spec in specs:
            parameter = torch.nn.Parameter(torch.zeros(spec.shape, dtype=spec.dtype), requires_grad=False)
            self.register_parameter(spec.name, parameter)

    def load_weights(self, weights: Any) -> set[str]:
        """Copy each into the parameter of its name."""
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


def ways(count: int, nbytes: int) -> tuple[dict[str, Callable[[], object]], Callable[[], bool]]:
    """Set up the ways to measure, for `count` tensors of `nbytes` each.

    Returns a callable for each way, by name, and a check that every element has arrived where it belongs.
    """
    width = nbytes // 2
    specs = [TensorSpec(f"t{index}", (width,), torch.bfloat16) for index in range(count)]
    sources = [torch.randint(-(2**15), 2**15, (width,), dtype=torch.int16).view(torch.bfloat16) for _ in specs]
    manifest = Manifest(1, tuple(specs), BUCKET_BYTES)
    total = manifest.total_bytes

    shards = [LocalShard.whole(spec, data) for spec, data in zip(specs, sources, strict=True)]
    stream = torch.zeros(total, dtype=torch.uint8)
    whole = Snapshot.of(shards, stream_places(shards, manifest) or [])

    cut = width // 2
    ranks = [
        [LocalShard(spec, (0,), data[:cut]) for spec, data in zip(specs, sources, strict=True)],
        [LocalShard(spec, (cut,), data[cut:]) for spec, data in zip(specs, sources, strict=True)],
    ]
    places = [compact_places(held) for held in ranks]
    tables = [
        CopyTable.of(snapshot_slices(*held, manifest.regions), manifest) for held in zip(ranks, places, strict=True)
    ]
    halves = [Snapshot.of(*held) for held in zip(ranks, places, strict=True)]
    memories = [torch.zeros(half.nbytes, dtype=torch.uint8) for half in halves]
    windows = [manifest.window(index) for index in range(manifest.bucket_count)]
    room, filled = torch.zeros(manifest.largest_bucket_bytes, dtype=torch.uint8), torch.zeros(total, dtype=torch.uint8)

    model = Live(specs)
    signature = {spec.name: SourceSpec(spec.shape, spec.dtype) for spec in specs}
    plan = CommitPlan(LayoutMap.from_plain(trace_loading(model, signature).to_plain()), model)
    staged = manifest.views(stream)
    memcpy_from, memcpy_to = np.ones(total, np.uint8), np.zeros(total, np.uint8)

    def two_snapshots() -> None:
        for half, memory in zip(halves, memories, strict=True):
            half.take(memory, None, Progress("a snapshot", "benchmark"))

    def fill_buckets() -> None:
        for start, stop in windows:
            payload = filled[start:stop]
            copy_runs(memories[0], tables[0], start, stop, payload)
            packed = gather_runs(memories[1], tables[1], start, stop, room)
            scatter_runs(packed, tables[1], start, stop, payload)

    def as_sent() -> bool:
        received = staged.values(), manifest.views(filled).values(), model.parameters()
        return all(
            torch.equal(tensor.view(torch.int16), data.view(torch.int16))
            for found in received
            for tensor, data in zip(found, sources, strict=True)
        )

    measured: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(memcpy_to, memcpy_from),
        "snapshot of one rank": lambda: whole.take(stream, None, Progress("a snapshot", "benchmark")),
        "snapshots of two ranks": two_snapshots,
        "buckets of two ranks": fill_buckets,
        "views of a version": lambda: manifest.views(stream),
        "commit": lambda: plan.commit(staged),
    }
    return measured, as_sent


def measure(count: int, nbytes: int, rounds: int) -> dict[str, Any]:
    """Median, least and most seconds of each way."""
    measured, as_sent = ways(count, nbytes)
    times: dict[str, list[float]] = {name: [] for name in measured}
    names = list(measured)
    for index in range(rounds + 2):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            began = time.perf_counter()
            measured[name]()
            if index > 1:
                times[name].append(time.perf_counter() - began)
    return {
        "tensors": count,
        "bytes_each": nbytes,
        "rounds": rounds,
        "verified": as_sent(),
        "seconds": {
            name: {"median": statistics.median(taken), "min": min(taken), "max": max(taken)}
            for name, taken in times.items()
        },
    }


def main() -> None:
    """Measure, print a table, write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=4096, help="of each tensor; even")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = measure(options.tensors, options.bytes, options.rounds)
    memcpy_s = found["seconds"]["memcpy"]["median"]
    print(f"{options.tensors} tensors of {options.bytes} bytes; at most {TARGET:g} memcpys are the aim")
    for name, taken in found["seconds"].items():
        print(
            f"{name:24} {1e3 * taken['median']:8.2f} ms ({1e3 * taken['min']:.2f} - {1e3 * taken['max']:.2f})"
            f"  {taken['median'] / memcpy_s:5.2f} memcpys"
        )
    if not found["verified"]:
        raise SystemExit("NOT VERIFIED: something is not where it belongs")
    if options.json:
        machine = {"machine": platform.machine(), "torch": torch.__version__, "threads": 1}
        options.json.write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
