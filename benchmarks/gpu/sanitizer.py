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
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.command import Report, as_figures, finish, options_of
from weightlane.ckpt_engines import CheckpointEngineRegistry
from weightlane.ckpt_engines.runtime.devices import numbered_device, runtime_of
from weightlane.ckpt_engines.runtime.json_socket import JsonSocket
from weightlane.sync import (
    CommitReport,
    Coordinator,
    Expectation,
    ExpectedTensor,
    LocalShard,
    Publisher,
    Rendezvous,
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


class Rollout:
    """The receiving process: its live model, and a subscriber."""

    def __init__(self, address: dict[str, Any], engine: str, device: torch.device) -> None:
        self._runtime = runtime_of(device)
        self._live = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in SHAPES.items()}
        expected = {name: ExpectedTensor(shape, frozenset({torch.bfloat16})) for name, shape in SHAPES.items()}
        self._subscriber = Subscriber("rollout-0/0", address, engine, {}, Expectation(expected), device=device)

    def commit(self, version: int) -> list[int]:
        """Load a version into the live model. Returns the model's `fingerprint`."""
        for name, tensor in self._subscriber.take(version).items():
            self._live[name].copy_(tensor, non_blocking=True)
        self._runtime.synchronize()
        self._subscriber.release(version)
        return fingerprint(self._live)

    def close(self) -> None:
        """End the subscription."""
        self._subscriber.close()


def fingerprint(tensors: dict[str, torch.Tensor]) -> list[int]:
    """A number for each tensor, in the order of `SHAPES`; equal for equal bits."""
    found = []
    for name in SHAPES:
        bits = tensors[name].view(torch.int16).flatten().long()
        found.append(int((bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum()))
    return found


def receive(engine: str, device: torch.device) -> None:
    """Serve the other process, which says on standard input what is to be done."""
    line = JsonSocket(socket.socket(fileno=0))
    asked = line.receive()
    assert asked is not None
    rollout = Rollout(asked["address"], engine, device)
    line.send({"ready": True})
    while (asked := line.receive()) is not None:
        line.send({"fingerprint": rollout.commit(asked["commit"])})
    rollout.close()


class Replica:
    """The receiving process as the coordinator sees it."""

    name = "rollout-0"

    def __init__(self, line: JsonSocket, deadline_s: float) -> None:
        self._line, self._deadline_s = line, deadline_s
        self.fingerprint: list[int] = []

    def subscriber_names(self) -> list[str]:
        """Name of the subscriber of its one rank."""
        return ["rollout-0/0"]

    async def commit(self, version: int) -> CommitReport:
        """Have the receiving process load a version."""
        answer = await asyncio.to_thread(self._ask, version)
        self.fingerprint = answer["fingerprint"]
        return CommitReport(version, blocked_s=0.0)

    def _ask(self, version: int) -> dict[str, Any]:
        self._line.send({"commit": version})
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
    line = JsonSocket(ours)
    closing: list[Any] = []
    try:
        rendezvous = Rendezvous.host()
        line.send({"address": rendezvous.address.to_plain()})
        if line.receive(deadline_s) is None:
            raise RuntimeError("the receiving process has died")
        generator = torch.Generator().manual_seed(0)
        live = {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}
        config = SyncConfig(bucket_mib=1, codec=codec, deadline_s=deadline_s, stall_s=deadline_s, retries=0)
        publisher = Publisher(
            "trainer-0",
            rendezvous.address,
            shards=[LocalShard.whole(SPECS[name], tensor) for name, tensor in live.items()],
            engine=CheckpointEngineRegistry().create(engine),
            config=config,
        )
        replica = Replica(line, deadline_s)
        coordinator = Coordinator(rendezvous, ["trainer-0"], [replica], config)
        closing += [coordinator, publisher]
        for version in range(1, VERSIONS + 1):
            publisher.publish(version)
            publisher.fence()
            asyncio.run(coordinator.sync(version))
            expected = fingerprint({name: tensor.bfloat16() for name, tensor in live.items()})
            if replica.fingerprint != expected:
                raise RuntimeError(f"version {version} arrived with other bits over {engine}, {codec}")
            for tensor in live.values():
                tensor.view(-1)[:: 97 + version].mul_(1.5)  # the optimizer's step
    finally:
        for part in closing:
            part.close()
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
