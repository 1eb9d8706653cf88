"""How fast the delta codec is and how small its deltas are, beside a memcpy of the same tensor in the same run.

    python benchmarks/delta_codec.py [--mib 256] [--rounds 5] [--dtype bfloat16] [--device cuda] [--json FILE]

One thread, or one GPU, between which and the bytes on the wire copies are counted. Changed positions are random; every result is
verified bit for bit outside the timing.
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

import torch

from weightlane.sync.codecs.delta.format import decode, encode
from weightlane.sync.codecs.delta.format.encoder import Encoded
from weightlane.sync.codecs.delta.format.patch import Patch

DENSITIES = (0.0, 0.001, 0.01, 0.1, 0.5, 1.0)


def measure(rounds: int, *work: Callable[[], object]) -> list[float]:
    """Median seconds of each piece of work, taken in turns, after one round that is not counted."""
    times: list[list[float]] = [[] for _ in work]
    on_gpu = torch.cuda.is_initialized()
    for turn in range(rounds + 1):
        for taken, piece in zip(times, work, strict=True):
            start = time.perf_counter()
            piece()
            if on_gpu:
                torch.cuda.synchronize()
            if turn:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def row(old: torch.Tensor, density: float, rounds: int) -> dict[str, Any]:
    """One density: times in seconds and wire bytes."""
    new = old.clone()
    integers = new.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[new.itemsize])
    for start in range(0, new.numel(), 1 << 24):
        part = integers[start : start + (1 << 24)]
        part ^= torch.rand(part.numel(), device=part.device).lt_(density).to(part.dtype)
    encoded = encode(old, new)
    assert isinstance(encoded, Encoded)
    wire = torch.empty(encoded.nbytes, dtype=torch.uint8)
    encoded.write_into(wire)
    patch = decode(wire, elements=new.numel(), itemsize=new.itemsize).to(old.device)
    target, copy = old.clone(), torch.empty_like(old)
    patch.flip_(target)
    assert torch.equal(target.view(integers.dtype), integers), "the delta is wrong"

    def write() -> None:
        result = encode(old, new)
        assert isinstance(result, Encoded)
        result.write_into(wire)

    def read() -> Patch:
        return decode(wire, elements=new.numel(), itemsize=new.itemsize).to(old.device)

    memcpy_s, encode_s, decode_s, swap_s = measure(
        rounds, lambda: copy.copy_(new), write, read, lambda: patch.flip_(target)
    )
    return {
        "density": encoded.changed / encoded.elements,
        "payload_bytes": new.nbytes,
        "wire_bytes": encoded.nbytes,
        "patch_bytes": patch.nbytes,
        "memcpy_s": memcpy_s,
        "encode_s": encode_s,
        "decode_s": decode_s,
        "swap_s": swap_s,
    }


def main() -> None:
    """Measure, print a table, write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the tensor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "uint8"])
    parser.add_argument("--density", type=float, nargs="*", default=DENSITIES)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    raw = torch.randint(-(2**62), 2**62, (options.mib << 17,), dtype=torch.int64)
    old = raw.view(getattr(torch, options.dtype)).to(options.device)
    rows = [row(old, density, options.rounds) for density in options.density]
    where = "one thread" if old.is_cpu else torch.cuda.get_device_name()
    print(f"{options.mib} MiB of {options.dtype}, {where}; times as multiples of a memcpy of the same tensor")
    print("density   wire share  bytes per change  memcpy GB/s  encode  decode    swap")
    for found in rows:
        changes = found["density"] * found["payload_bytes"] / old.itemsize
        times = "  ".join(f"{found[f'{step}_s'] / found['memcpy_s']:6.3f}" for step in ("encode", "decode", "swap"))
        print(
            f"{found['density']:7.4f}  {found['wire_bytes'] / found['payload_bytes']:10.4%}  "
            f"{found['wire_bytes'] / max(changes, 1):16.2f}  {found['payload_bytes'] / found['memcpy_s'] / 1e9:11.1f}  {times}"
        )
    if options.json:
        machine = {"machine": platform.machine(), "torch": torch.__version__, "threads": 1, "device": options.device}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
