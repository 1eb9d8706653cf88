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
from weightlane.sync.codecs.delta.format.frame_changes import DeviceChanges
from weightlane.sync.codecs.delta.format.raw import words_of
from weightlane.sync.codecs.delta.format.wire_format import BLOCK, FRAME

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
    """From positions and values that a device compacted, or from a mask: every method, more than one frame."""
    monkeypatch.setattr(cuda_kernels, "_kernels", lambda: None)
    numel = FRAME + 9 * BLOCK + 77
    share = torch.tensor([0.001, 0.0, 0.4, 1.0, 0.01]).repeat(100).repeat_interleave(BLOCK)[:numel]
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(0, 2**15, (numel,), dtype=torch.int16, generator=generator)
    new = old ^ (torch.rand(numel, generator=generator) < share).short()
    direct = encode(old, new)
    assert isinstance(direct, Encoded)
    positions, values = cuda_kernels.count_changes(old, new).compact()
    changes = DeviceChanges(positions.numpy(), words_of(values))
    at = 0
    parts = []
    for start in range(0, numel, FRAME):
        stop = min(start + FRAME, numel)
        parts += encoder._encode_frame(changes.frame(start, stop), stop - start).parts
    for mine, theirs in zip(parts, direct.parts[1:], strict=True):
        assert mine.tobytes() == theirs.tobytes()
        at += mine.size
    assert at == direct.nbytes - direct.parts[0].size
    received = old.clone()
    cuda_kernels.exchange(received, positions.int(), values)
    assert torch.equal(received, new)
    assert torch.equal(values, old[positions])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_on_a_gpu_the_delta_is_the_same_and_goes_in_and_out(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    numel = FRAME + 3 * BLOCK + 5
    old = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    new = old.clone()
    new.view(torch.uint8).view(numel, -1)[torch.rand(numel) < 0.01, 0] ^= 1
    here, there = encode(old, new), encode(old.cuda(), new.cuda())
    assert isinstance(here, Encoded)
    assert isinstance(there, Encoded)
    assert torch.equal(here.to_bytes(), there.to_bytes())
    patch = decode(there.to_bytes(), elements=numel, itemsize=dtype.itemsize).to("cuda")
    held = old.cuda()
    patch.swap_(held)
    assert torch.equal(held.cpu().view(torch.uint8), new.view(torch.uint8))
    patch.swap_(held)
    assert torch.equal(held.cpu().view(torch.uint8), old.view(torch.uint8))
