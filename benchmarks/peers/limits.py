"""Plain copies of the weights: lower limits on the time of any method that carries them within one machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from .halves import HalvesPeer, Link, Receiver, Sender
from .peer import Peer
from .workload import State, Workload, as_bytes, copy_all


class _Signals(Sender):
    def send(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        self.link.signal_receivers()


class _CopiesItsOwn(Receiver):
    """Copies from a private twin of the sender's tensors."""

    def __init__(self, link: Link, rank: int, workload: Workload, options: Mapping[str, Any]) -> None:
        super().__init__(link, rank, workload, options)
        self._twin = State(workload, 1000)

    def before_round(self, round_number: int) -> None:
        self._twin.change(round_number)

    def receive(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        self.link.await_sender(self.receiver)
        copy_all(self.tensors, self._twin.tensors)


class _Memcpy(HalvesPeer):
    group = "limit"
    through = "memory"
    packages = ("torch",)
    sender = _Signals
    receiver = _CopiesItsOwn

    def __init__(self, name: str, what: str, receivers_at_most: int | None) -> None:
        super().__init__(name, what)
        self.receivers_at_most = receivers_at_most


def _segment(link: Link, nbytes: int) -> torch.Tensor:
    return torch.from_file(str(link.memory_dir / "segment"), shared=True, size=nbytes, dtype=torch.uint8)


def _views(segment: torch.Tensor, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    parts = torch.split(segment, [tensor.nbytes for tensor in tensors.values()])
    return dict(zip(tensors, parts, strict=True))


class _CopiesIn(Sender):
    def prepare(self) -> None:
        self._views = _views(_segment(self.link, self.workload.nbytes), self.tensors)
        self.link.tell_receivers("there")

    def send(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        for name, tensor in self.tensors.items():
            self._views[name].copy_(as_bytes(tensor))
        self.link.signal_receivers()


class _CopiesOut(Receiver):
    def prepare(self) -> None:
        self.link.hear_sender(self.receiver)
        self._views = _views(_segment(self.link, self.workload.nbytes), self.tensors)

    def receive(self, round_number: int) -> float:  # noqa: ARG002 - the same every round
        self.link.await_sender(self.receiver)
        blocked_from = time.monotonic()
        for name, tensor in self.tensors.items():
            as_bytes(tensor).copy_(self._views[name])
        return blocked_from


class _InThenOut(HalvesPeer):
    group = "limit"
    through = "memory"
    packages = ("torch",)
    sender = _CopiesIn
    receiver = _CopiesOut


LIMITS: tuple[Peer, ...] = (
    _Memcpy("memcpy", "one process copies the payload once, pages touched before", 1),
    _Memcpy("memcpy-all", "every receiver copies the payload from its own memory at once", None),
    _InThenOut("copy-in-then-out", "the sender copies into shared memory, then every receiver copies out"),
)
