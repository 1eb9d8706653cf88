"""TorchStore: put_state_dict and get_state_dict over Monarch actors. On CPUs the tensors travel by Monarch's RPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from .peer import Needs, Peer, Session, Task, Times
from .workload import State, Workload

T = TypeVar("T")


def _node_class() -> Any:
    """The actor, whose base class is there only where Monarch is installed."""
    import torchstore
    from monarch.actor import Actor, endpoint

    class Node(Actor):  # type: ignore[misc]
        """A sender or receiver."""

        def __init__(self, workload: Workload, rank: int) -> None:
            torch.set_num_threads(1)
            self.state = State(workload, 1000 + rank)

        @endpoint  # type: ignore[untyped-decorator]
        async def change(self, round_number: int) -> int:
            self.state.change(round_number)
            return self.state.digest()

        @endpoint  # type: ignore[untyped-decorator]
        async def digest(self) -> int:
            return self.state.digest()

        @endpoint  # type: ignore[untyped-decorator]
        async def put(self) -> tuple[float, float]:
            began = time.monotonic()
            await torchstore.put_state_dict(self.state.tensors, "model")
            return began, time.monotonic()

        @endpoint  # type: ignore[untyped-decorator]
        async def get(self) -> tuple[float, float]:
            began = time.monotonic()
            await torchstore.get_state_dict("model", self.state.tensors)
            return began, time.monotonic()

    return Node


class _TorchStoreSession(Session):
    def __init__(self, task: Task) -> None:
        self._deadline_s = task.deadline_s
        self._workload = task.workload
        self._receivers = task.receivers
        self._loop = asyncio.new_event_loop()
        self._digest = 0

    def start(self) -> None:
        self.run(self._start())

    async def _start(self) -> None:
        import torchstore
        from monarch.actor import this_host

        kind = _node_class()
        self._nodes = []
        for rank in range(self._receivers + 1):
            processes = this_host().spawn_procs(per_host={"gpus": 1}, name=f"node{rank}")
            self._nodes.append(processes.spawn(f"node{rank}", kind, self._workload, rank))
        await torchstore.initialize()

    def change(self, round_number: int) -> None:
        self._digest = self.run(self._nodes[0].change.call_one(round_number))

    def exchange(self, round_number: int) -> Times:  # noqa: ARG002 - the same every round
        began, put = self.run(self._nodes[0].put.call_one())
        took = self.run(self._together("get"))
        done = max(ended for _, ended in took)
        return Times(put - began, max(ended - from_ for from_, ended in took), done - began)

    def verify(self, round_number: int) -> bool:  # noqa: ARG002 - the same every round
        return all(digest == self._digest for digest in self.run(self._together("digest")))

    async def _together(self, endpoint: str) -> list[Any]:
        return await asyncio.gather(*(getattr(node, endpoint).call_one() for node in self._nodes[1:]))

    def run(self, work: Awaitable[T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, self._deadline_s))

    def close(self) -> None:
        import torchstore

        self.run(torchstore.shutdown())


class _TorchStore(Peer):
    name = "torchstore"
    through = "network"
    what = "put_state_dict into one storage volume, get_state_dict into the tensors, over Monarch RPC"
    packages = ("torchstore", "torchmonarch")

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of the actors' processes, which put this repository on their import path."""
        return {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}

    def unavailable_reason(self) -> str | None:
        """Return why torchstore or Monarch cannot be imported and how to install it, or None."""
        return Needs(
            ("torchstore", "monarch.actor"), "pip install --no-deps torchstore torchmonarch (README.md has the rest)"
        ).missing()

    @contextmanager
    def open(self, task: Task) -> Iterator[Session]:
        """Start the store, and an actor each for the sender and every receiver; leaving shuts the store down."""
        session = _TorchStoreSession(task)
        try:
            session.start()
            yield session
        finally:
            session.close()


TORCHSTORE: tuple[Peer, ...] = (_TorchStore(),)
