"""Benchmark workloads have the shapes of their models, and each version changes a given share of the elements."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from weightlane.ckpt_engines import ConfigError
from weightlane.cli.bench.workload.workload import Payload, Workload, named_workload
from weightlane.sync import TensorSpec


@pytest.mark.parametrize(
    ("model", "tensors", "nbytes"),
    [
        # model.safetensors.index.json of the model on the Hugging Face Hub counts the tied head twice; here it is once
        ("qwen3-0.6b", 310, 1_192_099_840),
        ("qwen3-1.7b", 310, 3_441_149_952),
        ("many-small", 10_000, 10_000 * 4096),
    ],
)
def test_shapes_are_those_of_the_models(model: str, tensors: int, nbytes: int) -> None:
    workload = named_workload(model)
    assert (len(workload.specs), workload.nbytes) == (tensors, nbytes)
    assert Workload.from_plain(json.loads(json.dumps(workload.to_plain()))) == workload


SPECS = [
    TensorSpec("a", (300, 7), torch.bfloat16),
    TensorSpec("b", (), torch.float64),
    TensorSpec("c", (0, 3), torch.float32),
    TensorSpec("d", (1001,), torch.uint8),
    TensorSpec("e", (513,), torch.float8_e4m3fn),
]


@given(density=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_a_share_of_the_elements_changes_and_the_same_ones_for_the_same_seed(density: float, seed: int) -> None:
    one, other = Payload(SPECS), Payload(SPECS)
    for payload in (one, other):
        payload.fill(seed)
    before, crc = {name: tensor.clone() for name, tensor in one.tensors.items()}, one.crc()
    for payload in (one, other):
        payload.change(density, seed)
    assert one.crc() == other.crc()
    changed = bits(one.tensors["a"]) != bits(before["a"])
    spread = 6 * (2100 * density * (1 - density)) ** 0.5 + 1
    assert abs(int(changed.sum()) - 2100 * density) <= spread
    total = sum(int((bits(one.tensors[name]) != bits(before[name])).sum()) for name in before)
    assert (one.crc() == crc) == (total == 0)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.reshape(-1).view(integers)


def test_a_directory_gives_names_shapes_and_dtypes(tmp_path: Path) -> None:
    save_file({"x": torch.ones(3, 2, dtype=torch.float16), "y": torch.ones(5)}, tmp_path / "a.safetensors")
    save_file({"z": torch.ones(0, 2)}, tmp_path / "b.safetensors")
    assert set(named_workload(str(tmp_path)).specs) == {
        TensorSpec("x", (3, 2), torch.float16),
        TensorSpec("y", (5,), torch.float32),
        TensorSpec("z", (0, 2), torch.float32),
    }


def framed(header: Any) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def test_a_damaged_file_an_empty_directory_and_a_tensor_in_two_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no"):
        named_workload(str(tmp_path))
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}
    cases: list[tuple[bytes, str]] = [
        (b"\xff" * 8, "is not a safetensors file"),
        (framed({"w": 3}), "has a broken safetensors header"),
        (framed({"w": tensor}), "is truncated or damaged"),
        (framed({"w": tensor}) + bytes(4), "8 bytes by its shape, but 4 by its offsets"),
        (
            framed({"w": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}}) + bytes(2),
            "w in m.safetensors is BOOL",
        ),
    ]
    for content, said in cases:
        (tmp_path / "m.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=re.escape(said)):
            named_workload(str(tmp_path))
    for name in ("l", "m"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"w is in m\.safetensors and in an earlier file"):
        named_workload(str(tmp_path))
