"""Two processes sync a small model under torch's CUDA stream sanitizer, which ends either at the first race that it finds.

    python -m benchmarks.gpu.sanitizer [--device cuda] [--engine cuda_ipc --engine shm] [--deadline-s 40] [--json FILE]

The sanitizer sees torch's kernels, and what makes a stream or the host wait. It does not see copies by the driver, which
`cuda_ipc` makes, nor Triton's programs, nor that the host has asked an event. torch turns it on in one thread; here every thread
has it. With ``--device cpu`` the same run goes without it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.command import Report, as_figures, finish, options_of
from weightlane.ckpt_engines.runtime.devices import numbered_device, runtime_of
from weightlane.ckpt_engines.runtime.json_socket import JsonSocket
from weightlane.sync import (
    CollectivePublisher,
    CommitReport,
    Expectation,
    ExpectedTensor,
    LocalShard,
    Subscriber,
    SyncConfig,
    TensorSpec,
)

ENGINES = {"cuda": ("cuda_ipc", "shm"), "cpu": ("shm",)}
SHAPES = {"embedding": (4000, 512), "norm": (513,), "wide": (512, 3072), "bias": (7,)}
SPECS = {name: TensorSpec(name, shape, torch.bfloat16) for name, shape in SHAPES.items()}
VERSIONS = 4


def watch_every_thread() -> None:
    """Turn the sanitizer on, in this thread and in all to come. They share what it knows."""
    import torch.cuda._sanitizer as sanitizer
    from torch.utils._python_dispatch import TorchDispatchMode

    turn = threading.RLock()  # torch's record of streams and events is made for one thread
    for name, handle in list(vars(sanitizer.EventHandler).items()):
        if name.startswith("_handle_"):
            setattr(sanitizer.EventHandler, name, _in_turn(handle, turn))
    sanitizer.enable_cuda_sanitizer()
    known = sanitizer.cuda_sanitizer.dispatch.event_handler
    run = threading.Thread.run

    def watched(thread: threading.Thread) -> None:
        mode = sanitizer.CUDASanitizerDispatchMode.__new__(sanitizer.CUDASanitizerDispatchMode)
        TorchDispatchMode.__init__(mode)  # its own would make another record of everything
        mode.event_handler = known
        with mode:
            run(thread)

    threading.Thread.run = watched  # type: ignore[method-assign]


def _in_turn(handle: Callable[..., Any], turn: AbstractContextManager[Any]) -> Callable[..., Any]:
    def handled(*arguments: Any, **more: Any) -> Any:
        with turn:
            return handle(*arguments, **more)

    return handled


def fingerprint(tensors: dict[str, torch.Tensor]) -> list[int]:
    """A number for each tensor, in the order of `SHAPES`; equal for equal bits."""
    found = []
    for name in SHAPES:
        bits = tensors[name].view(torch.int16).flatten().long()
        found.append(int((bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum()))
    return found


def receive(engine: str, device: torch.device) -> None:
    """Be the receiving process, with a live model and a subscriber. The other process says on standard input what is to do."""
    line, runtime = JsonSocket(socket.socket(fileno=0)), runtime_of(device)
    live = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in SHAPES.items()}
    expected = {name: ExpectedTensor(shape, frozenset({torch.bfloat16})) for name, shape in SHAPES.items()}
    asked = line.receive()
    assert asked is not None
    subscriber = Subscriber("rollout-0/0", asked["address"], engine, {}, Expectation(expected), device=device)
    line.send({})
    while (asked := line.receive()) is not None:
        for name, tensor in subscriber.take(asked["commit"]).items():
            live[name].copy_(tensor, non_blocking=True)
        runtime.synchronize()
        subscriber.release(asked["commit"])
        line.send({"fingerprint": fingerprint(live)})
    subscriber.close()


class Replica:
    """The receiving process as the coordinator sees it."""

    name = "rollout-0"

    def __init__(self, line: JsonSocket, deadline_s: float) -> None:
        self._line, self._deadline_s = line, deadline_s
        self.fingerprint: list[int] = []

    def subscriber_names(self) -> list[str]:
        """Name of the subscriber of its one rank."""
        return ["rollout-0/0"]

    async def connect(self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any]) -> None:  # noqa: ARG002 - it has both
        """Have the receiving process subscribe."""
        await asyncio.to_thread(self._ask, {"address": dict(rendezvous)})

    async def commit(self, version: int) -> CommitReport:
        """Have the receiving process load a version."""
        answer = await asyncio.to_thread(self._ask, {"commit": version})
        self.fingerprint = answer["fingerprint"]
        return CommitReport(version, blocked_s=0.0)

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        self._line.send(what)
        answer = self._line.receive(self._deadline_s)
        if answer is None:
            raise RuntimeError("the receiving process has died")
        return dict(answer)

    async def rollback(self, version: int) -> None:
        """Nothing is to fail here: raises RuntimeError."""
        raise RuntimeError(f"version {version} was taken back")

    async def quarantine(self, error: Exception) -> None:
        """Nothing is to fail here: raises `error`."""
        raise error


def sync(engine: str, codec: str, device: torch.device, deadline_s: float) -> int:
    """Carry `VERSIONS` versions, each compared bit for bit. Returns how many; no wait takes longer than `deadline_s`."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "benchmarks.gpu.sanitizer", "--receive", engine, "--device", device.type]
    with theirs:
        child = subprocess.Popen(command, stdin=theirs.fileno(), stdout=sys.stderr.fileno(), env=dict(os.environ))  # noqa: S603
    replica = Replica(line := JsonSocket(ours), deadline_s)
    generator = torch.Generator().manual_seed(0)
    live = {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}
    shards = [LocalShard.whole(SPECS[name], tensor) for name, tensor in live.items()]
    config = SyncConfig(bucket_mib=1, codec=codec, deadline_s=deadline_s, stall_s=deadline_s, retries=0)
    try:
        with CollectivePublisher(shards, [replica], backend=engine, config=config) as publisher:
            for version in range(1, VERSIONS + 1):
                publisher.publish(version)
                publisher.fence()
                publisher.wait()
                expected = fingerprint({name: tensor.bfloat16() for name, tensor in live.items()})
                if replica.fingerprint != expected:
                    raise RuntimeError(f"version {version} arrived with other bits over {engine}, {codec}")
                for tensor in live.values():
                    tensor.view(-1)[:: 97 + version].mul_(1.5)  # the optimizer's step
    finally:
        line.close()
        try:
            child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if child.returncode:
        raise RuntimeError(f"the receiving process ended with {child.returncode}")
    return VERSIONS


def main() -> int:
    """Sync over every engine; exit code 1 as soon as there is a race, or a wrong bit."""
    parser = options_of(__doc__, deadline_s=40.0, device="cuda")
    parser.add_argument("--engine", action="append")
    parser.add_argument("--receive", metavar="ENGINE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = numbered_device(options.device)
    if options.device == "cuda":
        watch_every_thread()
    if options.receive:
        receive(options.receive, device)
        return 0

    def measured() -> Report:
        figures: dict[str, Any] = {}
        for engine in options.engine or ENGINES[options.device]:
            for codec in ("dense", "delta"):
                figures[f"versions over {engine}, {codec}"] = sync(engine, codec, device, options.deadline_s)
        return {"figures": figures, "verified": True}

    return finish("sanitizer", measured, as_figures, options.json, options.device)


if __name__ == "__main__":
    sys.exit(main())
