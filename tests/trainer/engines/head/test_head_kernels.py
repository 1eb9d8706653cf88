"""The head's device programs: right in Triton's interpreter, they compile for the GPUs that are meant, and run on one.

The first two are done in processes of their own, since whether programs are interpreted is decided when Triton is imported, and
Triton itself is imported nowhere else in the suite.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from head_oracle import Case, compare, compare_keys
from waiting import HANG_S

from weightlane.trainer.engines.head import LogitTransform, head_outputs, outputs
from weightlane.trainer.engines.head.chunks import CHUNK_BYTES

PROGRAM = str(Path(__file__).with_name("head_program.py"))
ASIDE = Path(sys.prefix) / "triton"
"""Where `make setup` puts Triton."""
needs_triton = pytest.mark.skipif(
    not ASIDE.is_dir() and importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@needs_triton
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("interpret", "13 cases"),
        pytest.param("compile", "2 programs", marks=pytest.mark.exhaustive),
        pytest.param("compile-more", "18 programs", marks=pytest.mark.exhaustive),
    ],
)
def test_the_programs_are_right_and_compile(children: Any, tmp_path: Path, what: str, says: str) -> None:
    env = {"TRITON_CACHE_DIR": str(tmp_path)}
    code, output, errors = children.run([PROGRAM, what, str(ASIDE)], timeout_s=3 * HANG_S, env=env, forked=True)
    assert code == 0, errors
    assert output.strip() == says


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("transform", "dtype", "values", "slopes"),
    [
        (LogitTransform(), torch.float32, 2e-5, 5e-6),
        (LogitTransform(2.0, 5.0), torch.bfloat16, 2e-5, 5e-3),
        (LogitTransform(), torch.float16, 2e-5, 1e-3),
    ],
)
def test_on_a_gpu_values_and_gradients_are_those_of_whole_logits(
    transform: LogitTransform, dtype: torch.dtype, values: float, slopes: float
) -> None:
    """Values of half precision, too, because logits are not rounded to it; gradients are."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert outputs._by_kernels(torch.zeros(0, device="cuda", dtype=dtype)), "triton is not installed"
    for sizes in ((515, 256, 5003), (300, 200, 1111), (0, 64, 256)):
        for further, labels, strided in ((True, (3,), False), (False, (), True)):
            case = Case(*sizes, labels, transform, further, True, top_k=8, chunk_bytes=2**20)
            compare(case, "cuda", dtype, values=values, slopes=slopes, strided=strided)
    for vocabulary, top_k in ((5003, 8), (1111, 300), (5, 9)):
        compare_keys(vocabulary, top_k, transform, "cuda", dtype, further=True, first=100)


@pytest.mark.gpu
def test_on_a_gpu_the_same_call_gives_the_same_bits_and_no_whole_logits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    random_of = torch.Generator("cuda").manual_seed(0)
    rows, width, vocabulary = 2048, 512, 151_936
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, generator=random_of)
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16, generator=random_of)
    targets = torch.randint(vocabulary, (rows,), device="cuda", generator=random_of)
    runs = []
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        found = head_outputs(*leaves, targets, entropy=True, top_k=20)
        (found.logprobs.sum() + found.entropy.sum()).backward()
        runs.append([found.logprobs, found.entropy, found.top_tokens, *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
    copies = 4 * weight.nbytes  # in either run, the leaf and its gradient
    assert torch.cuda.max_memory_allocated() - before < copies + 2 * CHUNK_BYTES < rows * vocabulary * 4
