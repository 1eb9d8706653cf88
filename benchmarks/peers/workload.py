"""The state dict that everybody carries: names, shapes, contents that change every round, and a digest of them."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch

_PERIOD = 1_000_003
"""Elements after which the contents would repeat, were they not altered; odd, so that no two tensors begin alike."""
_MIX = 2_654_435_761


@dataclass(frozen=True, slots=True)
class Workload:
    """Tensors by name, all bfloat16."""

    name: str
    shapes: dict[str, tuple[int, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return 2 * sum(math.prod(shape) for shape in self.shapes.values())


def workload_named(name: str) -> Workload:
    """``qwen3-0.6b`` (310 tensors, 1.19 GB) or ``tiny`` (24 tensors, 0.2 MB). Raises ValueError for another name."""
    if name == "qwen3-0.6b":
        return Workload(name, qwen3_shapes(1024, 28, 3072, 16, 8, 128, 151_936))
    if name == "tiny":
        return Workload(name, qwen3_shapes(64, 2, 128, 2, 1, 32, 512))
    raise ValueError(f"there is no workload {name!r}: take qwen3-0.6b or tiny")


def qwen3_shapes(
    hidden: int, layers: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int
) -> dict[str, tuple[int, ...]]:
    """The checkpoint tensors of a dense Qwen3 with tied embeddings, in the order of the file."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        of_layer = {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    return shapes


class State:
    """One process's tensors. The sender changes them with `change`; the receivers' become equal by an exchange.

    Args:
        workload: names and shapes.
        seed: of the contents: any bit pattern occurs, NaN payloads and denormals among them.
        flat: all tensors are views of one buffer, as only some ways of sending can use.
    """

    def __init__(self, workload: Workload, seed: int, *, flat: bool = False) -> None:
        self.flat: torch.Tensor | None = None
        if flat:
            self.flat = torch.empty(workload.nbytes // 2, dtype=torch.bfloat16)
            sizes = [math.prod(shape) for shape in workload.shapes.values()]
            views = torch.split(self.flat, sizes)
            self.tensors = {
                name: view.view(workload.shapes[name]) for name, view in zip(workload.shapes, views, strict=True)
            }
        else:
            self.tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in workload.shapes.items()}
        generator = torch.Generator().manual_seed(seed)
        bits = torch.randint(-(1 << 15), 1 << 15, (_PERIOD,), generator=generator, dtype=torch.int16)
        number = 0
        for tensor in self.tensors.values():
            for piece in torch.split(tensor.view(-1).view(torch.int16), _PERIOD):
                torch.bitwise_xor(bits[: len(piece)], number * 40_503 % 32_749, out=piece)
                number += 1

    def change(self, round_number: int) -> None:
        """Change every element, in a way that depends on the round alone."""
        mask = (round_number * _MIX + 12_345) % 32_749 + 1
        for tensor in self.tensors.values():
            tensor.view(torch.int16).bitwise_xor_(mask)

    def digest(self) -> int:
        """CRC-32 over all tensors in their order."""
        value = 0
        for tensor in self.tensors.values():
            value = zlib.crc32(as_bytes(tensor).numpy().data, value)
        return value


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes as uint8 [nbytes], sharing its memory."""
    return tensor.view(-1).view(torch.uint8)


def copy_all(into: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
    """Copy each tensor of `source` into the one of that name."""
    for name, tensor in into.items():
        tensor.copy_(source[name])
