"""The methods of the benchmark's sender and receivers. The benchmark's own process calls them one by one."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from weightlane.ckpt_engines import StorageError, as_weightlane_error
from weightlane.ckpt_engines.runtime.devices import HOST, DeviceRuntime, numbered_device, runtime_of
from weightlane.ckpt_engines.runtime.json_socket import JsonSocket
from weightlane.sync.config import Quantise, SyncConfig

from ..workload.workload import Payload, Workload, restored_crc
from .participants import ReceivingSide, SendingSide
from .peak_memory import PeakMemory
from .raw_transports import RawGloo, load, save

Span = tuple[float, float]
"""`time.monotonic` at the beginning and at the end."""
_SPIN_S = 0.001
"""Seconds before a common start that are spent spinning, because a sleep may end late by about as much."""
_TRAINING_SIDE = 256
_DECODING_SIDE = 4096
"""64 MiB of float32, more than caches hold, so that every step reads the matrix from memory as decoding does. A GPU also trains
with it, because a smaller product would only measure launches."""


class Loop:
    """A load like that of training or decoding: multiplies matrices on a thread of its own until it is stopped.

    Holds `turn` during each step, so that another holder stops the loop. If `decoding`, it multiplies a matrix by a vector, which
    memory bandwidth limits, instead of by a matrix.
    """

    def __init__(self, turn: threading.Lock, *, decoding: bool, runtime: DeviceRuntime) -> None:
        side = _DECODING_SIDE if decoding or runtime.has_streams else _TRAINING_SIDE
        self._left = torch.ones(side, side, device=runtime.device)
        self._right = torch.ones(side, 1 if decoding else side, device=runtime.device)
        self._runtime = runtime
        runtime.synchronize()  # before the loop reads them on another stream
        self._turn = turn
        self._steps = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightlane-bench-loop", daemon=True)
        self._thread.start()

    def steps(self) -> tuple[int, float]:
        """Return the number of steps so far and `time.monotonic`."""
        return self._steps, time.monotonic()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        # On the stream of the worker's main thread, commits would wait for the loop's steps.
        with self._runtime.on(self._runtime.stream_for(self)):
            into = torch.empty(self._left.shape[0], self._right.shape[1], device=self._left.device)
            while not self._stopped.is_set():
                with self._turn:
                    torch.mm(self._left, self._right, out=into)
                    self._runtime.synchronize()
                self._steps += 1


class WorkerMethods:
    """The methods of the sender, whose `index` is 0, and of receivers.

    Public ones are called by name; arguments and results are JSON. All workers share the memory `shared`.
    """

    def __init__(self, index: int, shared: mmap.mmap) -> None:
        self._index = index
        self._mapping = shared
        self._rows: dict[str, SendingSide | ReceivingSide] = {}
        self._workload = Workload("", ())
        self._payload = Payload(())
        self._kept: dict[str, torch.Tensor] = {}
        """A copy of the parameters for each row whose versions are deltas to them, which other rows overwrite."""
        self._scratch: torch.Tensor | None = None
        self._gloo: RawGloo | None = None
        self._bucket: torch.Tensor | None = None
        self._runtime: DeviceRuntime = runtime_of(HOST)
        self._on_host: torch.Tensor | None = None
        """A copy of a GPU's parameters, which gloo cannot send itself."""
        self._memory: dict[str, PeakMemory] = {}
        self._loop: Loop | None = None
        self._decoding = threading.Lock()
        """Held during a step of the decode loop, and during a commit."""

    def prepare(
        self,
        workload: Mapping[str, Any],
        seed: int,
        threads: int,
        finite: bool = False,
        device: str = "cpu",
        devices: int = 1,
    ) -> None:
        """Make the parameters: random bits in the sender, or finite numbers if `finite`; zeros in receivers.

        With several `devices`, the processes use them in turn.
        """
        torch.set_num_threads(threads)
        self._runtime = runtime_of(numbered_device(device, self._index % devices))
        self._seed = seed
        self._workload = Workload.from_plain(workload)
        self._payload = Payload(self._workload.specs, self._runtime.device)
        if self._index == 0:
            self._payload.fill(seed, finite=finite)

    def crc(self, quantise: Quantise = "none") -> int:
        """Return the CRC-32 of the current parameters; in the sender, of the parameters after quantising and restoring."""
        if self._index or quantise == "none":
            return self._payload.crc()
        return restored_crc(self._workload.specs, self._payload)

    # -- limits: plain copies -------------------------------------------------------------------------------------------

    def open_copies(self) -> None:
        """Allocate the target of the copies, and touch every page of it."""
        if self._index:
            self._scratch = torch.empty_like(self._payload.flat).zero_()
        else:
            self._shared().zero_()
        if self._runtime.has_streams:  # a device copies at full speed only to registered memory
            shared = self._shared()
            if not self._runtime.register_host(shared.data_ptr(), shared.numel()):
                raise StorageError(
                    f"{shared.numel() / 2**30:.1f} GiB of host memory cannot be registered with {self._runtime.device}.",
                    part="benchmark",
                    hint="Raise the limit of locked memory (ulimit -l), or measure a smaller model.",
                )

    def close_copies(self) -> None:
        """Free the target of the copies."""
        self._scratch = None
        if self._runtime.has_streams:
            self._runtime.unregister_host(self._shared().data_ptr())
        if self._index == 0:
            self._mapping.madvise(mmap.MADV_REMOVE)

    def copy_aside(self, at: float) -> Span:
        """Copy all parameters once within this process, starting at the time `at`."""
        assert self._scratch is not None
        started = _wait_until(at)
        self._scratch.copy_(self._payload.flat)
        self._runtime.synchronize()
        return started, time.monotonic()

    def copy_in(self) -> Span:
        """Copy all parameters into the shared memory."""
        shared = self._shared()
        started = time.monotonic()
        shared.copy_(self._payload.flat)
        self._runtime.synchronize()
        return started, time.monotonic()

    def copy_out(self, at: float) -> Span:
        """Copy all parameters out of the shared memory, starting at the time `at`."""
        assert self._scratch is not None
        shared = self._shared()
        started = _wait_until(at)
        self._scratch.copy_(shared)
        self._runtime.synchronize()
        return started, time.monotonic()

    def _shared(self) -> torch.Tensor:
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=self._payload.flat.numel())

    # -- limits: bare transports, and a blocking sync ---------------------------------------------------------------------

    def open_gloo(self, rendezvous: Mapping[str, Any], world: int, bucket_bytes: int, timeout_s: float) -> None:
        """Join the gloo group. All workers must call this at the same time."""
        self._gloo = RawGloo(rendezvous, self._index, world, timeout_s)
        self._bucket = self._runtime.host_memory(bucket_bytes)
        if self._runtime.has_streams:
            self._on_host = self._runtime.host_memory(self._payload.flat.numel())

    def close_gloo(self) -> None:
        """Leave the gloo group."""
        gloo, self._gloo, self._bucket, self._on_host = self._gloo, None, None, None
        if gloo is not None:
            gloo.close()

    def broadcast(self, at: float) -> Span:
        """Broadcast all parameters in one flat tensor into those of the receivers."""
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
        self._runtime.synchronize()
        return started, time.monotonic()

    def block(self, at: float) -> Span:
        """Do a blocking sync: both sides stop, and the parameters are sent bucket by bucket."""
        assert self._gloo is not None
        assert self._bucket is not None
        with self._decoding:
            started = _wait_until(at)
            self._gloo.broadcast_in_buckets(self._payload.tensors, self._bucket)
            self._runtime.synchronize()
            return started, time.monotonic()

    def save(self, path: str) -> Span:
        """Write all parameters to one safetensors file."""
        started = time.monotonic()
        save(self._payload.tensors, path)
        return started, time.monotonic()

    def load(self, path: str, at: float) -> Span:
        """Read a safetensors file into the parameters."""
        started = _wait_until(at)
        load(path, self._payload.tensors)
        return started, time.monotonic()

    # -- load during the syncs --------------------------------------------------------------------------------------------

    def start_loop(self) -> None:
        """Start the training loop in the sender, the decode loop in a receiver."""
        turn = self._decoding if self._index else threading.Lock()
        self._loop = Loop(turn, decoding=self._index > 0, runtime=self._runtime)

    def loop_steps(self) -> tuple[int, float]:
        """Return the number of steps so far and `time.monotonic`."""
        assert self._loop is not None
        return self._loop.steps()

    def stop_loop(self) -> None:
        """Stop the loop."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()

    def peak_bytes(self, row: str) -> int:
        """Return the most memory that the row took since it was opened, and stop measuring it."""
        return self._memory.pop(row).stop()

    # -- rows -------------------------------------------------------------------------------------------------------------

    def open_row(
        self,
        row: str,
        rendezvous: Mapping[str, Any],
        engine: str,
        options: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> None:
        """Make the row's publisher in the sender, its subscriber in a receiver, and measure the memory that it takes."""
        self._memory[row] = PeakMemory(shared=self._index == 0, runtime=self._runtime)
        settings, specs = SyncConfig.model_validate(config), self._workload.specs
        if self._index:
            name = subscriber_name(self._index - 1)
            self._rows[row] = ReceivingSide(name, rendezvous, engine, options, settings, specs, self._runtime)
        else:
            self._rows[row] = SendingSide(rendezvous, engine, options, settings, specs, self._payload.tensors)

    def change(self, density: float) -> None:
        """[sender] Change the share `density` of the parameters."""
        self._payload.change(density, self._seed)

    def keep(self, row: str) -> None:
        """[receiver] Copy the parameters, which are the row's last version, for `restore`."""
        self._kept[row] = self._payload.flat.clone()

    def restore(self, row: str) -> None:
        """[receiver] Copy the row's last version back into the parameters."""
        self._payload.flat.copy_(self._kept[row])

    def publish(self, row: str, version: int, step_s: float) -> dict[str, float]:
        """[sender] See `SendingSide.publish`."""
        side = self._rows[row]
        assert isinstance(side, SendingSide)
        return side.publish(version, step_s)

    def commit(self, row: str, version: int) -> Span:
        """[receiver] Commit a version between two steps of the decode loop: see `ReceivingSide.commit`."""
        side = self._rows[row]
        assert isinstance(side, ReceivingSide)
        return side.commit(version, self._payload.tensors, self._decoding)

    def moments(self, row: str, version: int) -> dict[str, float]:
        """See `Moments.of`."""
        return self._rows[row].moments.of(version)

    def close_row(self, row: str) -> None:
        """Close the row's publisher or subscriber."""
        self._kept.pop(row, None)
        self._rows.pop(row).close()


def subscriber_name(receiver: int) -> str:
    """Return the name under which a receiver subscribes."""
    return f"rollout-{receiver}/0"


def serve(requests: JsonSocket, index: int, shared: int, kind: type[WorkerMethods] = WorkerMethods) -> None:
    """Answer calls until the other end of the socket closes. `shared` is the descriptor of the memory that all workers share."""
    methods = kind(index, mmap.mmap(shared, 0))
    while (request := requests.receive()) is not None:
        try:
            answer = {"value": getattr(methods, request["method"])(*request["arguments"])}
        except Exception as error:  # noqa: BLE001 - the benchmark raises it
            answer = {"error": as_weightlane_error(error, f"benchmark worker {index}").to_wire()}
        requests.send(answer)


def _wait_until(at: float) -> float:
    """Return at the time `at`, even though the system ends a sleep late."""
    while (left := at - time.monotonic()) > 0:
        if left > _SPIN_S:
            time.sleep(left - _SPIN_S)
    return time.monotonic()
