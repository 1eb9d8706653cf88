"""The workload of a benchmark: a model's tensors, filled with random bits, of which some change every round."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.codecs.quantised import block_fp8
from weightlane.sync.codecs.quantised.quantisation import is_quantised
from weightlane.sync.version.tensor_spec import SAFETENSORS_DTYPES, TensorSpec, dtype_of
from weightlane.trainer.engines.hf.model_dir import read_header

_PART = "benchmark model"
_ALIGNMENT_BYTES = 64
_CHUNK_NUMEL = 1 << 24
"""Number of elements whose changes are drawn at a time, which limits the memory for the draws."""
_DENSE = 1 / 32
"""Share above which one draw per element is faster than drawing the positions of the changes."""
_EXPONENTS = {
    torch.bfloat16: (~0x7800, 0x3800),
    torch.float16: (~0x4000, 0),
    torch.float32: (~0x7800_0000, 0x3800_0000),
}
"""Bits to clear and to set so that random bits become finite numbers, by dtype."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Workload:
    """Names, shapes and dtypes of a model's tensors."""

    name: str
    specs: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def flat_bytes(self) -> int:
        """Size of a buffer that holds every tensor, each aligned."""
        return sum(_aligned(spec.nbytes) for spec in self.specs)

    def part(self, share: float) -> Workload:
        """Return tensors spread over the workload that have about `share` of its bytes, at least one."""
        chosen: list[TensorSpec] = []
        taken = passed = 0
        for spec in self.specs:
            passed += spec.nbytes
            if taken + spec.nbytes <= share * passed:
                chosen.append(spec)
                taken += spec.nbytes
        return Workload(f"{share:g} of {self.name}", tuple(chosen or [min(self.specs, key=lambda spec: spec.nbytes)]))

    def to_plain(self) -> dict[str, Any]:
        """Return the workload as plain data."""
        return {"name": self.name, "specs": [spec.to_plain() for spec in self.specs]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Workload:
        """Return the workload that `to_plain` turned into plain data."""
        specs = (TensorSpec(name, tuple(shape), dtype_of(dtype)) for name, shape, dtype in plain["specs"])
        return cls(plain["name"], tuple(specs))


class Payload:
    """The tensors of a workload in one zeroed block of memory on `device`, of which every page was touched.

    Random bits are drawn on the CPU, so that they are the same on every device.
    """

    def __init__(self, specs: Sequence[TensorSpec], device: torch.device | None = None) -> None:
        offsets = [0]
        for spec in specs:
            offsets.append(offsets[-1] + _aligned(spec.nbytes))
        self.flat = torch.zeros(offsets[-1], dtype=torch.uint8, device=device)
        self.flat.zero_()
        """1-D uint8; the gaps between tensors stay zero."""
        self.tensors = {
            spec.name: self.flat[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
            for spec, offset in zip(specs, offsets, strict=False)
        }
        """A view for every tensor, by name."""
        self._changes = 0

    def fill(self, seed: int, *, finite: bool = False) -> None:
        """Fill every tensor with random bits, among them NaN, denormals and -0.0. The seed determines all of them.

        With `finite`, tensors of every dtype that can be quantised get numbers of either sign between 2**-15 and 2 instead.
        """
        generator = torch.Generator().manual_seed(seed)
        for values in self._integers():
            # Drawing 64-bit integers needs the fewest draws. The last bytes are drawn separately.
            drawn = whole = values.view(torch.uint8) if values.is_cpu else torch.empty(values.nbytes, dtype=torch.uint8)
            body = whole.numel() // 8 * 8
            if whole.storage_offset() % 8 == 0 and body:
                whole[:body].view(torch.int64).random_(-(2**63), None, generator=generator)
                whole = whole[body:]
            whole.random_(0, 256, generator=generator)
            if not values.is_cpu:
                values.view(torch.uint8).copy_(drawn)
        for tensor in self.tensors.values() if finite else ():
            if tensor.dtype in _EXPONENTS:
                clear, put = _EXPONENTS[tensor.dtype]
                tensor.view(_INTEGERS[tensor.dtype.itemsize]).bitwise_and_(clear).bitwise_or_(put)

    def change(self, density: float, seed: int) -> None:
        """Change the share `density` of the elements. Seed and number of calls determine the positions.

        Elements are incremented as integers, so that none returns to an earlier value within a benchmark. An element that changed
        since a version therefore differs from it, however many changes lie between.
        """
        self._changes += 1
        generator = torch.Generator().manual_seed((seed << 20) + self._changes)
        for values in self._integers():
            if density >= 1:
                values.add_(1)
                continue
            for start in range(0, values.numel(), _CHUNK_NUMEL):
                chunk = values[start : start + _CHUNK_NUMEL]
                if density > _DENSE:
                    chunk.add_(_coins(chunk.numel(), density, generator).to(chunk.device))
                else:
                    positions = _positions(chunk.numel(), density, generator).to(chunk.device)
                    chunk.index_add_(0, positions, torch.ones_like(positions, dtype=chunk.dtype))

    def crc(self) -> int:
        """Return the CRC-32 of all bytes."""
        return _crc(self.flat.cpu())

    def _integers(self) -> list[torch.Tensor]:
        return [tensor.view(-1).view(_INTEGERS[tensor.dtype.itemsize]) for tensor in self.tensors.values()]


def restored_crc(specs: Sequence[TensorSpec], payload: Payload) -> int:
    """Return the `Payload.crc` of `payload` after quantising and restoring."""
    crc = 0
    for spec in specs:
        tensor = payload.tensors[spec.name]
        if is_quantised(spec):
            scales = block_fp8.scales_of(block_fp8.magnitudes(tensor))
            tensor = block_fp8.dequantise(block_fp8.quantise(tensor, scales), scales).to(tensor.dtype)
        crc = _crc(tensor.reshape(-1).view(torch.uint8).cpu(), crc)
        crc = zlib.crc32(bytes(_aligned(spec.nbytes) - spec.nbytes), crc)
    return crc


def _crc(data: torch.Tensor, so_far: int = 0) -> int:
    return zlib.crc32(data.numpy().data, so_far)


def _coins(numel: int, density: float, generator: torch.Generator) -> torch.Tensor:
    """Draw for each of `numel` elements whether it changes: bool, with probability `density` to within 1/65536."""
    draws = torch.empty(-(-numel // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return draws.view(torch.int16)[:numel] < min(round(density * 2**16), 2**16 - 1) - 2**15


def _positions(numel: int, density: float, generator: torch.Generator) -> torch.Tensor:
    """Draw ascending positions below `numel`, each with probability `density`: the gaps between them are geometric."""
    expected = numel * density
    draws = int(expected + 6 * math.sqrt(expected) + 8) if density > 0 else 0
    gaps = torch.empty(draws, dtype=torch.float64).exponential_(generator=generator)
    if draws:
        gaps = gaps.div_(-math.log1p(-density)).clamp_(max=numel).floor_()
    positions = (gaps.to(torch.int64) + 1).cumsum(0) - 1
    return positions[positions < numel]


def named_workload(model: str) -> Workload:
    """Return the workload called `model`, or that of the safetensors files in the directory `model`.

    Raises `ConfigError` if neither exists, a file is damaged, two hold the same tensor, or a dtype cannot be changed and sent.
    """
    if model in _NAMED:
        return Workload(model, tuple(_NAMED[model]()))
    path = Path(model)
    if path.is_dir():
        return Workload(path.resolve().name, tuple(_stored_specs(path)))
    raise ConfigError(
        f"{model!r} is neither a model that the benchmark knows nor a directory.",
        part=_PART,
        hint=f"Use one of {', '.join(_NAMED)}, or a directory of safetensors files.",
    )


def _stored_specs(directory: Path) -> list[TensorSpec]:
    """Return the tensors of every ``*.safetensors`` file in `directory`, from the files' headers."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{directory} holds no *.safetensors files.", part=_PART, hint="Give a model's directory.")
    specs: dict[str, TensorSpec] = {}
    for file in files:
        for name, entry in read_header(directory, file.name).items():
            if name in specs:
                raise ConfigError(f"{name} is in {file.name} and in an earlier file.", part=_PART)
            dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
            if dtype is None or dtype is torch.bool:  # which has two values, and elements change by counting up
                raise ConfigError(
                    f"{name} in {file.name} is {entry['dtype']}, which the benchmark cannot change and send.",
                    part=_PART,
                )
            specs[name] = spec = TensorSpec(name, entry["shape"], dtype)
            first, end = entry["data_offsets"]
            if end - first != spec.nbytes:
                raise ConfigError(
                    f"{file} is damaged: {name} has {spec.nbytes} bytes by its shape, but {end - first} by its offsets.",
                    part=_PART,
                )
    if not any(spec.numel for spec in specs.values()):
        raise ConfigError(f"the files of {directory} hold no values.", part=_PART)
    return list(specs.values())


def _qwen3(
    *,
    hidden: int,
    layers: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    vocabulary: int = 151936,
    tied: bool = True,
) -> list[TensorSpec]:
    """Return the tensors of a Qwen3 with the given sizes, which are in its config.json on the Hugging Face Hub."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{prefix}self_attn.q_norm.weight": (head_dim,),
            f"{prefix}self_attn.k_norm.weight": (head_dim,),
            f"{prefix}mlp.gate_proj.weight": (intermediate, hidden),
            f"{prefix}mlp.up_proj.weight": (intermediate, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, intermediate),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return [TensorSpec(name, shape, torch.bfloat16) for name, shape in shapes.items()]


_NAMED = {
    "tiny": lambda: _qwen3(hidden=64, layers=2, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocabulary=256),
    "qwen3-0.6b": lambda: _qwen3(hidden=1024, layers=28, intermediate=3072, heads=16, kv_heads=8),
    "qwen3-1.7b": lambda: _qwen3(hidden=2048, layers=28, intermediate=6144, heads=16, kv_heads=8),
    "qwen3-4b": lambda: _qwen3(hidden=2560, layers=36, intermediate=9728, heads=32, kv_heads=8),
    "qwen3-8b": lambda: _qwen3(hidden=4096, layers=36, intermediate=12288, heads=32, kv_heads=8, tied=False),
    "many-small": lambda: [TensorSpec(f"small.{number}", (2048,), torch.bfloat16) for number in range(10_000)],
}
MODELS = tuple(_NAMED)
"""Names that `named_workload` knows."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
