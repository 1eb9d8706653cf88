"""Clients of vLLM's weight-sync protocol that a user could have written, and a source of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from json_program import Program
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from weightlane.rollout.commit.transfer_calls import RANKS, replica_scope
from weightlane.sync import Expectation, ExpectedTensor, Subscriber

NEW = hasattr(WeightSource, "iter_full")
"""Whether this vLLM's sources have the interface of vLLM 0.33, and not that of 0.28 to 0.32."""
WEIGHTS = {"embed.weight": torch.arange(10.0).view(5, 2), "layers.0.w": torch.ones(3), "layers.1.w": torch.zeros(1, 2)}


def module_of(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose parameters are copies of tensors with the names of `WEIGHTS`."""
    module, held = torch.nn.Module(), torch.nn.ParameterDict
    module.embed = held({"weight": tensors["embed.weight"].clone()})
    module.layers = torch.nn.ModuleList(held({"w": tensors[f"layers.{number}.w"].clone()}) for number in range(2))
    return module


class _Tensors:
    """Fresh copies of `tensors`. `held` are the names that each rank holds; with None, every rank has all."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], held: Sequence[set[str]] | None = None, rank: int = 0
    ) -> None:
        self.tensors, self._held, self.rank = dict(tensors), held, rank
        self.shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


_of_vllm: Any = object if NEW else WeightSource


class GroupedTensors(_Tensors, _of_vllm):  # type: ignore[misc]  # vLLM is untyped here
    """A source for vLLM 0.28 to 0.32."""

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, *shape) for name, shape in self.shapes.items()]

    def held_names(self) -> set[str] | None:
        return None if self._held is None else self._held[self.rank]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        held = self.held_names()
        if held is None:
            yield from ((name, tensor.clone()) for name, tensor in self.tensors.items())
            return
        for group in self.groups():
            yield from ((name, self.tensors[name].clone() if name in held else None) for name in group)


_of_vllm = WeightSource if NEW else object


class OwnedTensors(_Tensors, _of_vllm):  # type: ignore[misc]
    """A source for vLLM 0.33."""

    @cached_property
    def metadata(self) -> list[Any]:
        return [
            SimpleNamespace(name=name, dtype=dtype, shape=shape, **self.owned(name))
            for name, (dtype, shape) in self.shapes.items()
        ]

    def owned(self, name: str) -> dict[str, Any]:
        held = self._held
        owners = None if held is None else tuple(rank for rank, names in enumerate(held) if name in names)
        return {"owners": owners, "mesh_shape": None, "placements": None}

    def owned_names(self, rank: int) -> list[str]:
        return [meta.name for meta in self.metadata if meta.owners is None or rank in meta.owners]

    def implements_iter_full(self) -> bool:
        return True

    def implements_iter_local(self) -> bool:
        return False

    def iter_full(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, self.tensors[name].clone()) for name in self.owned_names(self.rank))


class Slices(OwnedTensors):
    """Slices of every tensor's first dimension, of which the last rank has nothing where there is only one row."""

    def owned(self, name: str) -> dict[str, Any]:
        del name
        return {"owners": (1, 0), "mesh_shape": (1, 2), "placements": (SimpleNamespace(), SimpleNamespace(dim=0))}

    def implements_iter_full(self) -> bool:
        return False

    def implements_iter_local(self) -> bool:
        return True

    def iter_local(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self.tensors.items():
            yield name, [*torch.chunk(tensor.clone(), 2), tensor[:0]][1 - self.rank]


DictSource: Any = OwnedTensors if NEW else GroupedTensors
"""The source for this vLLM."""
FULL_PASS = "iter_full" if NEW else "__iter__"
"""The method of `DictSource` that yields full tensors."""


class FakeVLLM:
    """A client whose vLLM is one subscriber in this process. It notes the calls, and fails in those of `fails`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        expected = {
            name: ExpectedTensor(tuple(tensor.shape), frozenset({tensor.dtype})) for name, tensor in tensors.items()
        }
        self._expectation = Expectation(expected)
        self.calls: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.kept: list[dict[str, torch.Tensor]] = []
        """The weights before, which a rollback restores."""
        self._update: dict[str, int] = {}
        self._subscriber: Subscriber | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._note("init")
        self.close()
        replica, engine = init_info["replica"], (init_info["backend"], init_info["options"])
        self._subscriber = Subscriber(f"{replica}/0", init_info["rendezvous"], *engine, self._expectation)
        self._subscriber.rendezvous.mailbox(replica_scope(replica)).put(RANKS, 1)

    def start_weight_update(self) -> None:
        self._note("start")

    def update_weights(self, update_info: dict[str, int]) -> None:
        self._note("update")
        self._update = update_info

    def finish_weight_update(self) -> None:
        self._note("finish")
        assert self._subscriber is not None
        if "rollback_of" in self._update:
            self.weights = self.kept.pop()
            return
        version = self._update["version"]
        self.kept.append(self.weights)
        self.weights = {name: tensor.clone() for name, tensor in self._subscriber.take(version).items()}
        self._subscriber.release(version)

    def serves(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the weights are these, bit for bit."""
        same = (torch.equal(self.weights[name], tensor) for name, tensor in tensors.items())
        return self.weights.keys() == tensors.keys() and all(same)

    def close(self) -> None:
        if self._subscriber is not None:
            self._subscriber.close()

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fails:
            raise self.fails[call]


class OfflineClient:
    """Drives the `LLM` in `offline_process.py`."""

    def __init__(self, offline: Program) -> None:
        self._offline = offline

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)

    def _call(self, method: str, *arguments: object) -> None:
        if error := self._offline.call("attempt", method, arguments):
            raise RuntimeError(error)
