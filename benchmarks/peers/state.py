"""The state dict that everybody carries: names, shapes, contents that change every round, and a digest of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

    def to_plain(self) -> dict[str, Any]:
        """Return the workload as JSON-ready data with the shapes: a process that measures a peer may lack weightlane."""
        return {"name": self.name, "shapes": self.shapes}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Workload:
        """Rebuild a workload from the output of `to_plain`."""
        return cls(plain["name"], {name: tuple(shape) for name, shape in plain["shapes"].items()})


class State:
    """One process's tensors. The sender changes them with `change`; the receivers' become equal by an exchange.

    `seed` decides the contents: any bit pattern occurs, NaN payloads and denormals among them. If `flat`, all tensors are views
    of one buffer, as only some ways of sending can use.
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


def copy_all(into: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> None:
    """Copy each tensor of `source` into the one of that name."""
    for name, tensor in into.items():
        tensor.copy_(source[name])
