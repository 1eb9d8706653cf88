"""verl's own checkpoint engines over NIXL and Mooncake, with the tensors in host memory.

They are written for CUDA. What is put in their way here, with their classes untouched: a module ``cupy`` that imports, a
``torch.cuda.synchronize`` that does nothing, no pinned memory; and for Mooncake TCP in place of RDMA and a `TCPStore` in place
of vLLM's process group. Making their topology belongs to every version of their NIXL engine but is not in the timing.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed

from .halves import Half, HalvesPeer, Receiver, Sender
from .peer import Needs, Peer


class _StoreGroup:
    """The calls of vLLM's ``StatelessProcessGroup`` that verl uses, over a store."""

    def __init__(self, host: str, port: int, rank: int, world: int) -> None:
        self.rank = rank
        self._world = world
        self._store: Any = torch.distributed.TCPStore(host, port, world, is_master=rank == 0, wait_for_workers=True)
        self._sent: dict[tuple[int, int], int] = {}
        self._gathered = 0

    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int) -> _StoreGroup:
        return _StoreGroup(host, port, rank, world_size)

    def send_obj(self, value: object, dst: int) -> None:
        self._store.set(self._key(self.rank, dst), pickle.dumps(value))

    def recv_obj(self, src: int) -> Any:
        key = self._key(src, self.rank)
        value = pickle.loads(self._store.get(key))  # noqa: S301 - from this benchmark's own processes
        self._store.delete_key(key)
        return value

    def all_gather_obj(self, value: object) -> list[Any]:
        self._gathered += 1
        self._store.set(f"gather{self._gathered}/{self.rank}", pickle.dumps(value))
        keys = [f"gather{self._gathered}/{rank}" for rank in range(self._world)]
        return [pickle.loads(self._store.get(key)) for key in keys]  # noqa: S301 - as above

    def _key(self, source: int, target: int) -> str:
        number = self._sent[source, target] = self._sent.get((source, target), -1) + 1
        return f"{source}>{target}/{number}"


def _stand_ins(kind: str) -> None:
    """Put in place what a machine without CUDA lacks; see the module's docstring."""
    cupy: Any = types.ModuleType("cupy")
    cupy.ndarray = type("ndarray", (), {})
    cupy.uint8 = None
    sys.modules["cupy"] = cupy
    unpinned = torch.zeros

    def zeros(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:  # noqa: ARG001 - dropped
        return unpinned(*arguments, **options)

    torch.zeros = zeros  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None
    if kind == "mooncake":
        import mooncake.engine

        class OverTcp(mooncake.engine.TransferEngine):  # type: ignore[misc]
            def initialize(self, host: str, metadata: str, _protocol: str, device: str) -> Any:
                return super().initialize(host, metadata, "tcp", device)

        mooncake.engine.TransferEngine = OverTcp
        for name in ("vllm", "vllm.distributed", "vllm.distributed.utils"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["vllm.distributed.utils"].StatelessProcessGroup = _StoreGroup  # type: ignore[attr-defined]


class _Verl(Half):
    def prepare(self) -> None:
        os.environ["RANK"] = str(self.rank)
        kind = self.options["kind"]
        _stand_ins(kind)
        import ray.util
        from verl.checkpoint_engine import CheckpointEngineRegistry

        ray.util.get_node_ip_address = lambda *_: "127.0.0.1"
        if kind == "mooncake":
            import verl.checkpoint_engine.mooncake_checkpoint_engine as module

            module.get_torch_device = lambda: torch.cpu
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._class: Any = CheckpointEngineRegistry.get(kind)
        self._engine: Any = self._class(
            bucket_size=self.options["bucket_mib"] << 20, device="cpu", is_master=self.rank == 0
        )

    def before_round(self, round_number: int) -> None:
        if round_number == 0 or self.options["kind"] == "nixl":
            self._make_topology()

    def after_round(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        if self.options["kind"] == "nixl":
            self._engine.finalize()

    def _make_topology(self) -> None:
        mine = self._engine.prepare()
        if self.rank == 0:
            everybody = [mine, *self.link.hear_receivers()]
            trainers, rollouts = self._class.build_topology(1, self.link.receivers, everybody)
            for receiver in range(self.link.receivers):
                self.link.tell_receiver(
                    receiver, {key: value[receiver] for key, value in rollouts.items() if key != "method"}
                )
            place = {key: value[0] for key, value in trainers.items() if key != "method"}
        else:
            self.link.tell_sender(self.receiver, mine)
            place = self.link.hear_sender(self.receiver)
        self._engine.init_process_group(**place)


class _VerlSender(_Verl, Sender):
    def send(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        self._loop.run_until_complete(
            asyncio.wait_for(self._engine.send_weights(iter(self.tensors.items())), self.link.deadline_s)
        )


class _VerlReceiver(_Verl, Receiver):
    def receive(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        self._loop.run_until_complete(asyncio.wait_for(self._take(), self.link.deadline_s))

    async def _take(self) -> None:
        async for name, tensor in self._engine.receive_weights():
            self.tensors[name].copy_(tensor)


class _VerlPeer(HalvesPeer):
    sender = _VerlSender
    receiver = _VerlReceiver

    def __init__(self, name: str, what: str, kind: str, package: str, bucket_mib: int) -> None:
        super().__init__(name, what, kind=kind, bucket_mib=bucket_mib)
        self.through = "memory" if kind == "nixl" else "network"
        self.packages = ("verl", package)

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that keep Mooncake from logging every transfer."""
        return {"GLOG_minloglevel": "2"}

    def unavailable_reason(self) -> str | None:
        """Return why Ray, verl or the library of its engine cannot be imported and how to install it, or None."""
        engine = "nixl._api" if self.options["kind"] == "nixl" else "mooncake.engine"
        return Needs(
            ("ray", engine, "verl"), "pip install --no-deps verl in an environment of its own (README.md has the rest)"
        ).missing()


VERL: tuple[Peer, ...] = (
    _VerlPeer("verl-nixl", "verl's NIXL checkpoint engine, buckets of 64 MiB", "nixl", "nixl", 64),
    _VerlPeer(
        "verl-mooncake",
        "verl's Mooncake checkpoint engine over TCP, buckets of 512 MiB",
        "mooncake",
        "mooncake-transfer-engine-non-cuda",
        512,
    ),
)
