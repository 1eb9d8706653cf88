"""The device programs: exact in Triton's interpreter on integers, and they compile for the GPUs that are meant.

They run in a process of their own: Triton is imported nowhere else in the suite.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import HANG_S

from weightlane.sync.codecs.delta.format import cuda_kernels, decode, encode, encoder
from weightlane.sync.codecs.delta.format.encoder import Encoded
from weightlane.sync.codecs.delta.format.integer_views import words_of
from weightlane.sync.codecs.delta.format.wire_format import BLOCK

PROGRAM = str(Path(__file__).with_name("triton_program.py"))
ASIDE = Path(sys.prefix) / "triton"
"""Where `make setup` puts Triton."""
needs_triton = pytest.mark.skipif(
    not ASIDE.is_dir() and importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@needs_triton
@pytest.mark.parametrize(
    "capabilities", [["90"], pytest.param(["80", "100", "120"], marks=pytest.mark.exhaustive)], ids=" ".join
)
def test_the_programs_compile_for_gpus_and_are_exact(children: Any, tmp_path: Path, capabilities: list[str]) -> None:
    env = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ASIDE)}
    code, output, errors = children.run([PROGRAM, *capabilities], timeout_s=HANG_S, env=env)
    assert code == 0, errors
    assert output.splitlines() == ["6 cases", f"{3 * len(capabilities)} programs"]


def test_a_device_without_triton_and_the_cpu_write_the_same_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    """From positions and flips that a device compacted, or from a mask: gaps, bitmaps and no change."""
    monkeypatch.setattr(cuda_kernels, "_kernels", lambda: None)
    numel = 3 * BLOCK + 77
    share = torch.tensor([0.001, 0.0, 0.4, 1.0]).repeat_interleave(BLOCK)[:numel]
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(0, 2**15, (numel,), dtype=torch.int16, generator=generator)
    new = old ^ (torch.rand(numel, generator=generator) < share).short()
    direct = encode(old, new)
    assert isinstance(direct, Encoded)
    positions, flips = cuda_kernels.count_changes(old, new).compact()
    changes_in = encoder._on_device(positions.numpy(), words_of(flips))
    parts = []
    for start in range(0, numel, BLOCK):
        stop = min(start + BLOCK, numel)
        parts += encoder._block(changes_in(start, stop), stop - start)
    assert [part.tobytes() for part in parts] == [part.tobytes() for part in direct.parts[1:]]
    received = old.clone()
    cuda_kernels.flip(received, positions.int(), flips)
    assert torch.equal(received, new)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_on_a_gpu_the_delta_is_the_same_and_goes_in_and_out(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    numel = 3 * BLOCK + 5
    old = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    new = old.clone()
    new.view(torch.uint8).view(numel, -1)[torch.rand(numel) < 0.01, 0] ^= 1
    here, there = encode(old, new), encode(old.cuda(), new.cuda())
    assert isinstance(here, Encoded)
    assert isinstance(there, Encoded)
    assert torch.equal(here.to_bytes(), there.to_bytes())
    patch = decode(there.to_bytes(), elements=numel, itemsize=dtype.itemsize).to("cuda")
    held = old.cuda()
    patch.flip_(held)
    assert torch.equal(held.cpu().view(torch.uint8), new.view(torch.uint8))
    patch.flip_(held)
    assert torch.equal(held.cpu().view(torch.uint8), old.view(torch.uint8))
