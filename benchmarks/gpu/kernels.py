"""The delta codec and fp8 on a device: how fast, and whether the CPU gives the same bits.

    python -m benchmarks.gpu.kernels [--device cuda] [--mib 1024] [--json FILE]

Rates are of the new weights' bytes. A delta is of elements of two bytes, of which 1 % have changed. Old and new weights lie on
the device; what the delta is encoded to, and decoded from, lies on the host, and copies between them count.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.command import Report, as_figures, finish, options_of
from weightlane.ckpt_engines.runtime.devices import DeviceRuntime, numbered_device, runtime_of
from weightlane.sync.codecs.delta.format import cuda_kernels, decode, encode
from weightlane.sync.codecs.delta.format.encoder import Encoded
from weightlane.sync.codecs.quantised import block_fp8

DENSITY = 0.01
ROUNDS = 5
COLUMNS = 4096
_COMPARED_NUMEL = 1 << 24
"""Elements for which the CPU computes the result, too: all of them would take it minutes."""


def median_s(runtime: DeviceRuntime, work: Callable[[], object]) -> float:
    """Median seconds that `work` takes on the device, over `ROUNDS` rounds after one that warms up."""
    times = []
    for _ in range(ROUNDS + 1):
        runtime.synchronize()
        started = time.perf_counter()
        work()
        runtime.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def copy(runtime: DeviceRuntime, mib: int) -> dict[str, Any]:
    """How fast the device copies within its memory, which no codec can exceed."""
    source = torch.zeros(mib << 20, dtype=torch.uint8, device=runtime.device)
    target = torch.empty_like(source)
    return {"copy, GB/s": source.nbytes / median_s(runtime, lambda: target.copy_(source)) / 1e9}


def delta(runtime: DeviceRuntime, mib: int) -> dict[str, Any]:
    """Figures of the delta codec. Raises AssertionError when anything is not bit for bit what it has to be."""
    device = runtime.device
    numel = mib << 19
    old = torch.randint(-(2**15), 2**15, (numel,), dtype=torch.int16, device=device)
    new = old ^ (torch.rand(numel, device=device) < DENSITY).to(torch.int16)
    part = slice(0, min(numel, _COMPARED_NUMEL))
    here, there = encode(old[part].cpu(), new[part].cpu()), encode(old[part], new[part])
    assert isinstance(here, Encoded)
    assert isinstance(there, Encoded)
    assert torch.equal(here.to_bytes(), there.to_bytes()), "the device's delta is not the CPU's"
    encoded = encode(old, new)
    assert isinstance(encoded, Encoded)
    wire = encoded.to_bytes()
    patch = decode(wire, elements=numel, itemsize=2).to(device)
    target = old.clone()
    patch.flip_(target)
    assert torch.equal(target, new), "the delta does not lead to the new weights"
    patch.flip_(target)
    assert torch.equal(target, old), "the delta does not lead back"
    figures = {"delta: wire share": encoded.nbytes / new.nbytes}
    work: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(old, new),
        "decode": lambda: decode(wire, elements=numel, itemsize=2).to(device),
        "write": lambda: patch.flip_(target),
    }
    if runtime.has_streams:
        work["compare and compact"] = lambda: cuda_kernels.count_changes(old, new).compact()
    for name, piece in work.items():
        figures[f"delta: {name}, GB/s"] = new.nbytes / median_s(runtime, piece) / 1e9
    return figures


def fp8(runtime: DeviceRuntime, mib: int) -> dict[str, Any]:
    """Figures of block fp8, of bf16 weights. Raises AssertionError when anything is not bit for bit what it has to be."""
    rows = (mib << 19) // COLUMNS
    matrix = torch.randn(rows, COLUMNS, device=runtime.device).bfloat16()
    scales = block_fp8.scales_of(block_fp8.magnitudes(matrix))
    quantised = block_fp8.quantise(matrix, scales)
    restored = torch.empty_like(matrix)
    block_fp8.dequantise(quantised, scales, out=restored)
    some = min(rows, _COMPARED_NUMEL // COLUMNS)
    on_cpu = matrix[:some].cpu()
    own_scales = block_fp8.scales_of(block_fp8.magnitudes(on_cpu))
    own = block_fp8.quantise(on_cpu, own_scales)
    blocks = own_scales.shape[0] if some == rows or some % 128 == 0 else own_scales.shape[0] - 1
    whole = min(some, blocks * 128)
    assert torch.equal(scales[:blocks].cpu(), own_scales[:blocks]), "the device's scales are not the CPU's"
    assert torch.equal(quantised[:whole].cpu().view(torch.uint8), own[:whole].view(torch.uint8)), "nor are the elements"
    again = torch.empty(some, COLUMNS, dtype=torch.bfloat16)
    block_fp8.dequantise(own, own_scales, out=again)
    assert torch.equal(restored[:whole].cpu(), again[:whole]), "nor is what they stand for"
    work: dict[str, Callable[[], object]] = {
        "quantise": lambda: block_fp8.quantise(
            matrix, block_fp8.scales_of(block_fp8.magnitudes(matrix)), out=quantised
        ),
        "restore": lambda: block_fp8.dequantise(quantised, scales, out=restored),
    }
    return {f"fp8: {name}, GB/s": matrix.nbytes / median_s(runtime, piece) / 1e9 for name, piece in work.items()}


def measure(device: str, mib: int) -> Report:
    """The report: figures of the copy, the delta codec and fp8, measured on a stream of their own."""
    torch.manual_seed(0)
    runtime = runtime_of(numbered_device(device))
    with runtime.on(runtime.stream_for(runtime)):
        figures = copy(runtime, mib)
        figures |= delta(runtime, mib)
        figures |= fp8(runtime, mib)
    return {"figures": figures | {"equal to the CPU": "yes"}, "verified": True}


def main() -> int:
    """Measure, and write JSON if asked to."""
    parser = options_of(__doc__, device="cuda")
    parser.add_argument("--mib", type=int, default=1024, help="of the weights")
    options = parser.parse_args()
    report = partial(measure, options.device, options.mib)
    return finish("kernels", report, as_figures, options.json, options.device)


if __name__ == "__main__":
    sys.exit(main())
