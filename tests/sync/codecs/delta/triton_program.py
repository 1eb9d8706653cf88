"""Run by test_delta_kernels.py, in a process of its own: interprets the programs on the CPU, and compiles them for GPUs.

The arguments are the GPUs' compute capabilities, times ten.
"""

from __future__ import annotations

import os
import sys

import torch

from weightlane.sync.codecs.delta.format import cuda_kernels


def changes(dtype: torch.dtype, numel: int, density: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    limits = torch.iinfo(dtype)
    old = torch.randint(limits.min, limits.max, (numel,), dtype=dtype, generator=generator)
    where = torch.rand(numel, generator=generator) < density
    return old, torch.where(where, old ^ 1, old)


def interpret() -> None:
    """Both passes and the flipping against plain torch."""
    from weightlane.sync.codecs.delta.format import triton_kernels

    checked = 0
    for dtype in (torch.uint8, torch.int64):
        for numel, density in ((1, 1.0), (triton_kernels.BLOCK, 0.0), (2 * triton_kernels.BLOCK + 7, 0.3)):
            old, new = changes(dtype, numel, density)
            counted = cuda_kernels.count_changes(old, new)
            assert counted.ends is not None, "the programs were not used"
            expected = (old != new).nonzero().squeeze(1)
            assert counted.total == expected.numel()
            positions, flips = counted.compact()
            assert torch.equal(positions, expected)
            assert torch.equal(flips, (old ^ new)[expected])
            target = old.clone()
            cuda_kernels.flip(target, positions.int(), flips)
            assert torch.equal(target, new)
            cuda_kernels.flip(target, positions.int(), flips)
            assert torch.equal(target, old)
            checked += 1
    print(f"{checked} cases")


def compile_for_gpus(capabilities: list[int]) -> None:
    """Code for each architecture and the smallest and the largest size of elements."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from weightlane.sync.codecs.delta.format import triton_kernels

    made = 0
    block = {"BLOCK": triton_kernels.BLOCK}
    for number, capability in enumerate(capabilities):
        item = ("i16", "i64")[number % 2]
        old_and_new, found = {"old": f"*{item}", "new": f"*{item}"}, {"positions": "*i32", "flips": f"*{item}"}
        programs = [
            (triton_kernels.count_kernel, old_and_new | {"counts": "*i32"}),
            (triton_kernels.compact_kernel, old_and_new | {"ends": "*i64"} | found | {"positions": "*i64"}),
            (triton_kernels.flip_kernel, {"target": f"*{item}"} | found),
        ]
        for kernel, pointers in programs:
            signature = {**pointers, "size": "i64", **dict.fromkeys(block, "constexpr")}
            source = ASTSource(fn=kernel, signature=signature, constexprs=block)
            compiled = triton_kernels.triton.compile(source, target=GPUTarget("cuda", capability, 32))
            assert len(compiled.asm["cubin"]) > 1000
            made += 1
    print(f"{made} programs")


if __name__ == "__main__":
    if not (child := os.fork()):
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
        interpret()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    compile_for_gpus([int(argument) for argument in sys.argv[1:]])
    sys.stdout.flush()
    os._exit(0)  # an interpreter with torch takes a second to end
