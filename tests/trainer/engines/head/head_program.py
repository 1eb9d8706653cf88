"""Run by test_head_kernels.py, in a process of its own: ``interpret`` runs the programs on CPU, ``compile`` makes GPU code.

``compile`` makes it with every option in bfloat16; ``compile-more`` also without, in other precisions, for every architecture,
and with other numbers of tokens to keep.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, sys.argv[2])  # where Triton is
if sys.argv[1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from head_oracle import Case, compare, compare_keys
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from weightlane.trainer.engines.head import (
    LogitTransform,
    VocabularyShare,
    cuda_kernels,
    head_outputs,
    outputs,
    triton_kernels,
)

ROWS, WIDTH, VOCABULARY = 70, 37, 150
"""More than one block in each direction, and none of them full."""
MOST_STACK = 64
"""Bytes of stack that a program may have per thread; those that hold too much in registers have hundreds."""
MOST_MOVES = 8
"""How often one turn of the loop that multiplies may use the stack. Programs that keep tokens have more of it, and use it between
such loops.
"""
SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""The shared memory that a program may have, in bytes, by compute capability."""
KEPT = cuda_kernels._MOST_KEPT
ONCE = ((torch.bfloat16, 90, True, (KEPT,)),)
"""Dtype, compute capability, whether every option is used, and how many tokens are kept."""
MORE = (
    (torch.bfloat16, 80, True, (0, 8, KEPT)),
    (torch.bfloat16, 100, True, (KEPT,)),
    (torch.bfloat16, 90, False, (0, 1, 8)),
    (torch.float16, 90, True, (KEPT,)),
    *((torch.float32, capability, True, (KEPT,)) for capability in (80, 90)),
    (torch.float32, 80, False, (0,)),
)


def interpret() -> None:
    """Values and gradients against float64, of float32 inputs: the interpreter rounds wrongly to bfloat16."""
    outputs._by_kernels = lambda hidden: True
    plain, capped = LogitTransform(), LogitTransform(2.0, 5.0)
    whole = (ROWS, WIDTH, VOCABULARY)
    cases = [
        Case(*whole, (), plain, further=True, entropy=True, top_k=5),
        Case(*whole, (3,), capped, further=True, entropy=True, top_k=5),
        Case(*whole, (3,), LogitTransform(0.3), further=False, entropy=False, top_k=0),
        *(Case(*size, (), plain, further=True, entropy=True, top_k=1) for size in ((0, WIDTH, VOCABULARY), (1, 1, 1))),
    ]
    for number, case in enumerate(cases):
        compare(case, "cpu", torch.float32, strided=number % 2 == 1)
    # One split with a buffer for one block of the vocabulary, and as many splits as there are blocks with one for all.
    for programs, chunk_bytes in ((1, 1), (10**6, 2**20)):
        cuda_kernels._PROGRAMS = programs
        case = Case(*whole, (2,), LogitTransform(0.5, 3.0), True, True, 7, chunk_bytes)
        compare(case, "cpu", torch.float32)
    # Logits of some hundreds, where sums that are not relative to the largest logit would overflow or lose all digits.
    # Those lie 6e-5 apart in float32.
    large = Case(*whole, (), LogitTransform(50.0), False, True, 3)
    compare(large, "cpu", torch.float32, values=2e-4, slopes=2e-4)
    shifted()
    print(f"{len(cases) + 4 + kept()} cases")


def kept() -> int:
    """Keys of the largest logits, also of more than a program keeps at a time, or than there are; returns how many cases."""
    cases = (
        (1, 150, 5, LogitTransform(-1.0), "cpu", torch.float32, False),  # -0.0 and 0.0
        (10**6, 150, 3, LogitTransform(0.5), "cpu", torch.bfloat16, True, 1000),
        (10**6, 70, 13, LogitTransform(2.0, 3.0), "cpu", torch.float32, True),
        (10**6, 5, 9, LogitTransform(), "cpu", torch.float16, False, 3),
    )
    cuda_kernels._MOST_KEPT = 7
    multiply = InterpreterBuilder.create_dot
    InterpreterBuilder.create_dot = lambda self, *operands: multiply(self, *map(widened, operands[:2]), *operands[2:])
    for cuda_kernels._PROGRAMS, *case in cases:
        compare_keys(*case)
    return len(cases)


def widened(operand: TensorHandle) -> TensorHandle:
    """Bfloat16 as float32: the interpreter would multiply its bits, as whole numbers."""
    if operand.dtype.scalar != triton_kernels.tl.bfloat16:
        return operand
    return TensorHandle((operand.data.astype("uint32") << 16).view("float32"), triton_kernels.tl.float32)


def shifted() -> None:
    """A share of the vocabulary that begins at token 100, of a single rank, gives the same for targets moved by 100."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    hidden, weight, targets = torch.randn(70, 9), torch.randn(130, 9), torch.randint(130, (70, 2))
    found = []
    for first, share in ((0, None), (100, VocabularyShare(100, torch.distributed.group.WORLD))):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        got = head_outputs(*leaves, targets + first, entropy=True, top_k=4, share=share)
        (got.logprobs.sum() + got.entropy.sum()).backward()
        found.append([got.logprobs, got.entropy, got.top_tokens - first, got.top_logprobs, *(e.grad for e in leaves)])
    for whole, part in zip(*found, strict=True):
        torch.testing.assert_close(whole, part, atol=1e-5, rtol=1e-5)
    torch.distributed.destroy_process_group()


def compile_for_gpus(combinations: Iterable[tuple[torch.dtype, int, bool, tuple[int, ...]]]) -> None:
    """Code for each architecture and dtype, with every option and with none, as sizes that are multiples of 16 make it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    made = 0
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    for dtype, capability, full, counts in combinations:
        item = f"*{names[dtype]}"
        optional = {"bias": item, "temperatures": "*fp32", "softcap": "fp32"}
        sizes = dict.fromkeys(("row_count", "column_count", "width", "hidden_stride", "weight_stride"), "i32")
        common = {"hidden": item, "weight": item, "scale": "fp32", **optional, **sizes}
        entropies = {"entropies": "*fp32", "by_entropy": "*fp32"}
        labels = {"labels": "*i32", "label_count": "i32", "log_sums": "*fp32", **entropies}
        splits = {"chosen": "*fp32", "splits": "i32", "blocks_per_split": "i32", "top_k": "i32", "first": "i32"}
        keys = {"best": "*i64", "bounds": "*i64"}
        slopes = {"by_label": "*fp32", "by_all": "*fp32", "slopes": item}
        blocks = dict(cuda_kernels.DTYPES[dtype])
        settings = {key: blocks.pop(key) for key in ("num_warps", "num_stages")}
        sums = {**common, **labels, **splits, **keys}
        kernels = [(triton_kernels.sums_kernel, sums, blocks | {"SLOTS": count}) for count in counts]
        kernels.append((triton_kernels.slopes_kernel, {**common, **labels, **slopes}, blocks))
        for kernel, types, settled in kernels:
            kept = settled.get("SLOTS", 0)
            values = dict.fromkeys(() if kept else keys)
            if not full:
                values |= dict.fromkeys((*optional, *entropies, "bounds"))
                # A launch makes arguments that are 1 constants, such as the number of labels nearly always.
                values |= dict.fromkeys(("row_count", "label_count", "splits", "blocks_per_split"), 1)
                values |= {"top_k": 1} if kept == 1 else {}
            constants = settled | {key: value for key, value in values.items() if key in kernel.arg_names}
            signature = {key: "constexpr" if key in constants else types[key] for key in kernel.arg_names}
            whole = [["tt.divisibility", 16]]
            aligned = {
                (place,): whole
                for place, key in enumerate(kernel.arg_names)
                if signature[key].startswith("*") or key in ("width", "hidden_stride", "weight_stride", "column_count")
            }
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
            compiled = triton_kernels.triton.compile(source, target=GPUTarget("cuda", capability, 32), options=settings)
            assert compiled.metadata.shared <= SHARED_LIMITS[capability], (kernel, capability, compiled.metadata.shared)
            stack, moves = spilled(compiled.asm["cubin"])
            assert moves <= MOST_MOVES, (kernel, dtype, capability, full, kept, moves)
            assert stack <= MOST_STACK or kept, (kernel, dtype, capability, full, stack)
            made += 1
    print(f"{made} programs")


def spilled(code: bytes) -> tuple[int, int]:
    """The bytes of stack that a program in `code` has because its numbers do not fit into registers, and how often one turn of
    the loop that multiplies uses them.
    """
    tools = Path(triton_kernels.triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        usage, text = (
            subprocess.run([str(tools / tool), option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    lines, starts, loops = text.splitlines(), {}, []
    for number, line in enumerate(lines):
        if label := re.match(r"(\.L_x_\d+):", line):
            starts[label[1]] = number
        elif (jump := re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) and jump[1] in starts:
            loops.append("\n".join(lines[starts[jump[1]] : number]))
    multiplies = min(
        (loop for loop in loops if len(re.findall(r"\b(?:HMMA|HGMMA|UTCHMMA|FFMA)\b", loop)) >= 4), key=len
    )
    moves = len(re.findall(r"\b(?:LDL|STL)\b", multiplies))
    return max(int(size) for size in re.findall(r"STACK:(\d+)", usage)), moves


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors are small, and threads that wait for work take CPU time
    if sys.argv[1] == "interpret":
        interpret()
    else:
        compile_for_gpus(MORE if sys.argv[1] == "compile-more" else ONCE)
