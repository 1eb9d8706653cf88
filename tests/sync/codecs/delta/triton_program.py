"""Run by test_delta_kernels.py, in a process of its own: ``interpret`` runs the programs on CPU, ``compile`` makes GPU code."""

from __future__ import annotations

import os
import sys

if sys.argv[1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from weightlane.sync.codecs.delta.format import cuda_kernels, triton_kernels


def changes(dtype: torch.dtype, numel: int, density: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    limits = torch.iinfo(dtype)
    old = torch.randint(limits.min, limits.max, (numel,), dtype=dtype, generator=generator)
    where = torch.rand(numel, generator=generator) < density
    return old, torch.where(where, old ^ 1, old)


def interpret() -> None:
    """Both passes and the exchange against plain torch."""
    checked = 0
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        for numel in (1, triton_kernels.BLOCK, 3 * triton_kernels.BLOCK + 7):
            for density in (0.0, 0.02, 0.6, 1.0):
                old, new = changes(dtype, numel, density)
                counted = cuda_kernels.count_changes(old, new)
                assert counted.ends is not None, "the programs were not used"
                expected = (old != new).nonzero().squeeze(1)
                assert counted.total == expected.numel()
                positions, values = counted.compact()
                assert torch.equal(positions, expected)
                assert torch.equal(values, new[expected])
                target = old.clone()
                cuda_kernels.exchange(target, positions.int(), values)
                assert torch.equal(target, new)
                assert torch.equal(values, old[expected])
                cuda_kernels.exchange(target, positions.int(), values)
                assert torch.equal(target, old)
                checked += 1
    print(f"{checked} cases")


def compile_for_gpus() -> None:
    """Code for each architecture and element size."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    made = 0
    block = {"BLOCK": triton_kernels.BLOCK}
    for item, capabilities in (("i16", (80, 90, 100)), ("i64", (90,))):
        programs = [
            (triton_kernels.count_kernel, {"old": f"*{item}", "new": f"*{item}", "counts": "*i32"}, block),
            (
                triton_kernels.compact_kernel,
                {"old": f"*{item}", "new": f"*{item}", "ends": "*i64", "positions": "*i64", "values": f"*{item}"},
                block,
            ),
            (
                triton_kernels.exchange_kernel,
                {"target": f"*{item}", "positions": "*i32", "values": f"*{item}"},
                block,
            ),
        ]
        for kernel, pointers, constants in programs:
            signature = {**pointers, "size": "i64", **dict.fromkeys(constants, "constexpr")}
            for capability in capabilities:
                source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
                compiled = triton_kernels.triton.compile(source, target=GPUTarget("cuda", capability, 32))
                assert len(compiled.asm["cubin"]) > 1000
                made += 1
    print(f"{made} programs")


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for_gpus}[sys.argv[1]]()
