"""For tests of layouts: tensors of random bits, and a process that builds models."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import torch

PROGRAM = str(Path(__file__).with_name("layout_process.py"))
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, *, seed: int) -> torch.Tensor:
    """Any bits at all; among the first are -0.0, a denormal and a NaN with a payload."""
    integer = INTEGERS[dtype.itemsize]
    limits = torch.iinfo(integer)
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(limits.min, limits.max, shape, dtype=integer, generator=generator)
    special = torch.tensor([0x8001, 0x0001, 0x7FA1, 0x8000], dtype=torch.int64) << (8 * (dtype.itemsize - 2))
    flat = numbers.view(-1)
    count = min(len(special), flat.numel())
    flat[:count] = special[:count].to(integer)
    return numbers.view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the raw bytes."""
    return tensor.detach().clone().reshape(-1).view(torch.uint8)


class LayoutProcess:
    """`layout_process.py`, called by method name."""

    def __init__(self, children: Any) -> None:
        self._child = children.start([PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT)

    def call(self, method: str, *arguments: Any) -> Any:
        self._child.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._child.stdin.flush()
        for line in self._child.stdout:
            if line.startswith("SAY"):
                return json.loads(line.removeprefix("SAY"))
        raise AssertionError(f"the process ended with {self._child.wait(30.0)}")

    def close(self) -> None:
        """End it."""
        self._child.kill()
