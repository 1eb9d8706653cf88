"""What the benchmark's processes do: the sender and the receivers, driven call by call from the benchmark's own process."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import StorageError, as_weightlane_error
from weightlane.ckpt_engines.conformance.processes.json_line import Line
from weightlane.ckpt_engines.runtime.devices import HOST, DeviceRuntime, numbered_device, runtime_of
from weightlane.sync.config import Quantise

from ..workload.workload import Payload, Workload, restored_crc
from .load_loop import Loop
from .network_namespace import enter_network
from .participants import ReceivingSide, SendingSide
from .peak_memory import PeakMemory
from .raw_transports import RawGloo, load, save

Span = tuple[float, float]
"""`time.monotonic` at the beginning and at the end."""
_SPIN_S = 0.001


class WorkerMethods:
    """What both sides have. Public methods are called by name; arguments and results are JSON."""

    def __init__(self, index: int, shared: mmap.mmap) -> None:
        self._index = index
        self._mapping = shared
        self._workload = Workload("", ())
        self._payload = Payload(())
        self._scratch: torch.Tensor | None = None
        self._gloo: RawGloo | None = None
        self._bucket: torch.Tensor | None = None
        self._runtime: DeviceRuntime = runtime_of(HOST)
        self._on_host: torch.Tensor | None = None
        """Of a GPU's parameters, for gloo."""
        self._memory: dict[str, PeakMemory] = {}
        self._loop: Loop | None = None
        self._decoding = threading.Lock()
        """Held for a step of the decode loop, and for a commit."""

    def prepare(
        self,
        workload: Mapping[str, Any],
        seed: int,
        threads: int,
        finite: bool = False,
        device: str = "cpu",
        devices: int = 1,
    ) -> None:
        """Make the parameters: random ones in the sender, numbers if they shall be `finite`; zeros in receivers.

        Of several `devices` the processes take one each in turn.
        """
        torch.set_num_threads(threads)
        self._runtime = runtime_of(numbered_device(device, self._index % devices))
        self._seed = seed
        self._workload = Workload.from_plain(workload)
        self._payload = Payload(self._workload.specs, self._runtime.device)
        if self._index == 0:
            self._payload.fill(seed, finite=finite)

    def enter_network(self, path: str) -> None:
        """See `network.enter_network`; everything that is opened from now on is there."""
        enter_network(path)

    def crc(self, quantise: Quantise = "none") -> int:
        """Of the parameters as they are now; in the sender, of what quantising leaves of them."""
        if self._index or quantise == "none":
            return self._payload.crc()
        return restored_crc(self._workload.specs, self._payload, quantise)

    # -- limits: plain copies -------------------------------------------------------------------------------------------

    def open_copies(self) -> None:
        """Make the memory that is copied to, and touch it."""
        if self._index:
            self._scratch = torch.empty_like(self._payload.flat).zero_()
        else:
            self._shared().zero_()
        if self._runtime.has_streams:  # at full speed only between a device and memory that it knows
            shared = self._shared()
            if not self._runtime.register_host(shared.data_ptr(), shared.numel()):
                raise StorageError(
                    f"{shared.numel() / 2**30:.1f} GiB of host memory cannot be registered with {self._runtime.device}.",
                    part="benchmark",
                    hint="Raise the limit of locked memory (ulimit -l), or measure a smaller model.",
                )

    def close_copies(self) -> None:
        """Give it back."""
        self._scratch = None
        if self._runtime.has_streams:
            self._runtime.unregister_host(self._shared().data_ptr())
        if self._index == 0 and hasattr(mmap, "MADV_REMOVE"):
            self._mapping.madvise(mmap.MADV_REMOVE)

    def copy_aside(self, at: float) -> Span:
        """One copy of all parameters within this process."""
        assert self._scratch is not None
        started = _wait_until(at)
        self._scratch.copy_(self._payload.flat)
        self._runtime.finish()
        return started, time.monotonic()

    def copy_in(self) -> Span:
        """One copy of all parameters into the shared memory."""
        shared = self._shared()
        started = time.monotonic()
        shared.copy_(self._payload.flat)
        self._runtime.finish()
        return started, time.monotonic()

    def copy_out(self, at: float) -> Span:
        """One copy out of the shared memory."""
        assert self._scratch is not None
        shared = self._shared()
        started = _wait_until(at)
        self._scratch.copy_(shared)
        self._runtime.finish()
        return started, time.monotonic()

    def _shared(self) -> torch.Tensor:
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=self._payload.flat.numel())

    # -- limits: raw transports, and the blocking way ---------------------------------------------------------------------

    def open_gloo(self, rendezvous: Mapping[str, Any], world: int, bucket_bytes: int, timeout_s: float) -> None:
        """Everybody connects at the same time."""
        self._gloo = RawGloo(rendezvous, self._index, world, timeout_s)
        self._bucket = self._runtime.host_memory(bucket_bytes)
        if self._runtime.has_streams:
            self._on_host = self._runtime.host_memory(self._payload.flat.numel())

    def close_gloo(self) -> None:
        """Leave the group."""
        gloo, self._gloo, self._bucket, self._on_host = self._gloo, None, None, None
        if gloo is not None:
            gloo.close()

    def broadcast(self, at: float) -> Span:
        """All parameters in one flat broadcast, over those of the receivers."""
        assert self._gloo is not None
        started = _wait_until(at)
        if self._on_host is None:
            self._gloo.broadcast(self._payload.flat)
            return started, time.monotonic()
        if not self._index:
            self._on_host.copy_(self._payload.flat)
        self._gloo.broadcast(self._on_host)
        if self._index:
            self._payload.flat.copy_(self._on_host)
        self._runtime.finish()
        return started, time.monotonic()

    def block(self, at: float) -> Span:
        """The blocking way: everything stops, and the parameters go across bucket by bucket."""
        assert self._gloo is not None
        assert self._bucket is not None
        with self._decoding:
            started = _wait_until(at)
            self._gloo.broadcast_in_buckets(self._payload.tensors, self._bucket)
            self._runtime.finish()
            return started, time.monotonic()

    def save(self, path: str) -> Span:
        """All parameters as one safetensors file."""
        started = time.monotonic()
        save(self._payload.tensors, Path(path))
        return started, time.monotonic()

    def load(self, path: str, at: float) -> Span:
        """Such a file over the parameters."""
        started = _wait_until(at)
        load(Path(path), self._payload.tensors)
        return started, time.monotonic()

    # -- what runs meanwhile ----------------------------------------------------------------------------------------------

    def start_loop(self) -> None:
        """Train, or decode."""
        turn = self._decoding if self._index else threading.Lock()
        self._loop = Loop(turn, decoding=self._index > 0, runtime=self._runtime)

    def loop_steps(self) -> tuple[int, float]:
        """See `Loop.steps`."""
        assert self._loop is not None
        return self._loop.steps()

    def stop_loop(self) -> None:
        """Neither."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()

    def peak_bytes(self, row: str) -> int:
        """Most memory the row took since it was opened; from now on it is not watched any more."""
        return self._memory.pop(row).stop()


class Sender(WorkerMethods):
    """The trainer's side."""

    def __init__(self, index: int, shared: mmap.mmap) -> None:
        super().__init__(index, shared)
        self._rows: dict[str, SendingSide] = {}

    def change(self, density: float) -> None:
        """Change that share of the parameters."""
        self._payload.change(density, self._seed)

    def open_row(
        self,
        row: str,
        rendezvous: Mapping[str, Any],
        engine: str,
        options: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> None:
        """Make the row's publisher."""
        self._memory[row] = PeakMemory(shared=True, runtime=self._runtime)
        specs, tensors = self._workload.specs, self._payload.tensors
        self._rows[row] = SendingSide(rendezvous, engine, options, config, specs, tensors)

    def publish(self, row: str, version: int, step_s: float) -> dict[str, float]:
        """See `SendingSide.publish`."""
        return self._rows[row].publish(version, step_s)

    def moments(self, row: str, version: int) -> dict[str, float]:
        """See `Moments.of`."""
        return self._rows[row].moments.of(version)

    def close_row(self, row: str) -> None:
        """End the row's publisher."""
        self._rows.pop(row).close()


class Receiver(WorkerMethods):
    """A rollout's side."""

    def __init__(self, index: int, shared: mmap.mmap) -> None:
        super().__init__(index, shared)
        self._rows: dict[str, ReceivingSide] = {}

    def open_row(
        self,
        row: str,
        rendezvous: Mapping[str, Any],
        engine: str,
        options: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> None:
        """Make the row's subscriber."""
        self._memory[row] = PeakMemory(shared=False, runtime=self._runtime)
        name = subscriber_name(self._index - 1)
        self._rows[row] = ReceivingSide(name, rendezvous, engine, options, config, self._workload.specs, self._runtime)

    def commit(self, row: str, version: int) -> Span:
        """See `ReceivingSide.commit`; between two steps of the decode loop."""
        return self._rows[row].commit(version, self._payload.tensors, self._decoding)

    def moments(self, row: str, version: int) -> dict[str, float]:
        """See `Moments.of`."""
        return self._rows[row].moments.of(version)

    def close_row(self, row: str) -> None:
        """End the row's subscriber."""
        self._rows.pop(row).close()


def subscriber_name(receiver: int) -> str:
    """Under which name a receiver subscribes."""
    return f"rollout-{receiver}/0"


def serve(line: Line, index: int, shared: mmap.mmap) -> None:
    """Answer calls until the other end is gone.

    Args:
        line: Where they come from.
        index: 0 for the sender, else a receiver.
        shared: Memory that all workers share.
    """
    target = Receiver(index, shared) if index else Sender(index, shared)
    methods: dict[str, Callable[..., Any]] = {
        name: getattr(target, name) for name in dir(target) if not name.startswith("_")
    }
    while (request := line.receive()) is not None:
        try:
            answer = {"value": methods[request["method"]](*request["arguments"])}
        except Exception as error:  # noqa: BLE001 - whatever it was, the benchmark reports it
            answer = {"error": as_weightlane_error(error, f"benchmark worker {index}").to_wire()}
        with contextlib.suppress(OSError):
            line.send(answer)


def _wait_until(at: float) -> float:
    """Return at that moment, however roughly the system sleeps."""
    while (left := at - time.monotonic()) > 0:
        if left > _SPIN_S:
            time.sleep(left - _SPIN_S)
    return time.monotonic()
