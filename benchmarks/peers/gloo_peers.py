"""gloo, as torch.distributed offers it: the way most training scripts begin."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .halves import Half, HalvesPeer, Receiver, Sender
from .peer import Peer


class _Joined(Half):
    """Joins one gloo group with everybody."""

    def prepare(self) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.link.memory_dir}/meeting",
            rank=self.rank,
            world_size=self.link.receivers + 1,
            timeout=timedelta(seconds=self.link.deadline_s),
        )

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _broadcast(tensors: dict[str, torch.Tensor], at_once: bool) -> None:
    works = []
    for tensor in tensors.values():
        work = dist.broadcast(tensor, 0, async_op=at_once)
        if work is not None:
            works.append(work)
    for work in works:
        work.wait()


class _TensorSender(_Joined, Sender):
    def send(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        _broadcast(self.tensors, self.options["at_once"])


class _TensorReceiver(_Joined, Receiver):
    def receive(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        _broadcast(self.tensors, self.options["at_once"])


class _FlatSender(_Joined, Sender):
    flat = True

    def send(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        assert self.state.flat is not None
        dist.broadcast(self.state.flat, 0)


class _FlatReceiver(_Joined, Receiver):
    flat = True

    def receive(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        assert self.state.flat is not None
        dist.broadcast(self.state.flat, 0)


class _Gloo(HalvesPeer):
    through = "network"
    packages = ("torch",)

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that bind gloo to the loopback interface, so that nothing leaves this machine."""
        return {"GLOO_SOCKET_IFNAME": "lo"}


class _PerTensor(_Gloo):
    sender = _TensorSender
    receiver = _TensorReceiver


class _Flat(_Gloo):
    sender = _FlatSender
    receiver = _FlatReceiver


def _per_tensor(name: str, what: str, **options: Any) -> Peer:
    return _PerTensor(name, what, **options)


GLOO: tuple[Peer, ...] = (
    _per_tensor("gloo-per-tensor", "one blocking broadcast per tensor, into the receivers' tensors", at_once=False),
    _per_tensor("gloo-async", "the same broadcasts, all started at once", at_once=True),
    _Flat("gloo-flat", "one broadcast of a buffer that all tensors are views of, on both sides"),
)
