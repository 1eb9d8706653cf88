"""Plain copies, which are the limits of everybody on one machine; gloo as torch offers it; safetensors files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightlane.cli.bench.workload.workload import Workload

from .halves import Half, Line, Peer, as_bytes, copy_all, filled


class _Signals(Half):
    """Only says when to begin."""

    def exchange(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        self.line.signal_receivers()


class _CopiesItsOwn(Half):
    """Copies from a private twin of the sender's tensors."""

    def __init__(self, line: Line, rank: int, workload: Workload, options: Mapping[str, Any]) -> None:
        super().__init__(line, rank, workload, options)
        self._twin = filled(workload, rank=0)

    def before_round(self, round_number: int) -> None:
        self._twin.change(1.0, round_number)

    def exchange(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        self.line.await_sender(self.receiver)
        copy_all(self.tensors, self._twin.tensors)


class _InSharedMemory(Half):
    """Has a part of one shared segment for each tensor."""

    def prepare(self) -> None:
        path = str(self.line.memory_dir / "segment")
        if self.rank:
            self.line.from_sender(self.receiver)
        segment = torch.from_file(path, shared=True, size=self.workload.nbytes, dtype=torch.uint8)
        if not self.rank:
            self.line.tell_receivers("it is there")
        parts = torch.split(segment, [tensor.nbytes for tensor in self.tensors.values()])
        self.parts = dict(zip(self.tensors, parts, strict=True))


class _CopiesIn(_InSharedMemory):
    """Copies into the segment."""

    def exchange(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        copy_all(self.parts, {name: as_bytes(tensor) for name, tensor in self.tensors.items()})
        self.line.signal_receivers()


class _CopiesOut(_InSharedMemory):
    """Copies out of the segment."""

    def exchange(self, round_number: int) -> float:  # noqa: ARG002 - the same every round
        self.line.await_sender(self.receiver)
        began = time.monotonic()
        copy_all({name: as_bytes(tensor) for name, tensor in self.tensors.items()}, self.parts)
        return began


class _Broadcasts(Half):
    """Broadcasts every tensor, all started at once, in one gloo group."""

    def prepare(self) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.line.memory_dir}/group",
            rank=self.rank,
            world_size=self.line.receivers + 1,
            timeout=timedelta(seconds=self.line.deadline_s),
        )

    def exchange(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        for work in [dist.broadcast(tensor, 0, async_op=True) for tensor in self.sent()]:
            assert work is not None, "asynchronous"
            work.wait()

    def sent(self) -> Iterable[torch.Tensor]:
        """The tensors that are broadcast one by one."""
        return self.tensors.values()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class _BroadcastsFlat(_Broadcasts):
    """Broadcasts one buffer."""

    def sent(self) -> Iterable[torch.Tensor]:
        return [self.payload.flat]


class _Saves(Half):
    """Saves a safetensors file."""

    def path(self, round_number: int) -> Path:
        """Where a round's file is."""
        return (self.line.memory_dir if self.options["tmpfs"] else self.line.disk_dir) / f"round-{round_number}"

    def exchange(self, round_number: int) -> float | None:
        from safetensors.torch import save_file

        save_file(self.tensors, self.path(round_number))
        self.line.signal_receivers()
        return None

    def after_round(self, round_number: int) -> None:
        if not self.rank:
            self.path(round_number).unlink()


class _Loads(_Saves):
    """Loads it, and copies."""

    def exchange(self, round_number: int) -> float:
        from safetensors.torch import load_file

        self.line.await_sender(self.receiver)
        began = time.monotonic()
        copy_all(self.tensors, load_file(self.path(round_number)))
        return began


_COPY = "one process copies the payload once, pages touched before"
_LO: dict[str, Any] = {"environment": {"GLOO_SOCKET_IFNAME": "lo"}}
_FILES: dict[str, Any] = {
    "packages": ("safetensors",), "modules": ("safetensors.torch",), "install": "pip install safetensors"
}  # fmt: skip
PLAIN = (
    Peer("memcpy", "memory", _COPY, _Signals, _CopiesItsOwn, group="limit", most_receivers=1),
    Peer("memcpy-all", "memory", "every receiver does so at once", _Signals, _CopiesItsOwn, group="limit"),
    Peer("copy-in-then-out", "memory", "through shared memory, with a snapshot", _CopiesIn, _CopiesOut, group="limit"),
    Peer("gloo-async", "network", "a broadcast for each tensor, all started at once", _Broadcasts, _Broadcasts, **_LO),
    Peer("gloo-flat", "network", "a broadcast of one flat buffer", _BroadcastsFlat, _BroadcastsFlat, **_LO),
    Peer("safetensors-page-cache", "files", "save_file, load_file, copy", _Saves, _Loads, {"tmpfs": False}, **_FILES),
    Peer("safetensors-tmpfs", "files", "the same on tmpfs", _Saves, _Loads, {"tmpfs": True}, **_FILES),
)
