"""`DeviceRuntime`: streams, events and memory of a CPU, a CUDA device or an NPU, for code that moves bytes.

Every thread has a current device, which is number 0 in a new thread, whatever it was in the thread that started it. Code here
never relies on it: it is given a device with its index, and uses the device inside `DeviceRuntime.current` or on a stream.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError

HOST = torch.device("cpu")
_log = logging.getLogger(__name__)
_PORTABLE, _READ_ONLY = 1, 8
"""``cudaHostRegisterPortable``, for all devices of the process, and ``cudaHostRegisterReadOnly``, for pages mapped read-only."""


def checked_device(device: torch.device | str, part: str = "device") -> torch.device:
    """Return `device`. Raises `ConfigError` for an accelerator without index, which would mean a thread's current device."""
    device = torch.device(device)
    if device.type == HOST.type:
        return HOST
    if device.index is None:
        raise ConfigError(
            f"{device.type} is not one device.", part=part, hint=f"Add its index, such as {device.type}:0."
        )
    return device


class DeviceRuntime:
    """Streams, events and memory of one device. `runtime_of` returns the runtime of a device.

    `module` is torch's module for the device type, such as ``torch.cuda``. A CPU has none: its streams and events are None,
    because every call has finished its work when it returns.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.device = device
        self._module = module
        self._unused: list[Any] = []
        """Streams whose owners were collected, to be used again: torch has 32 per device, and its 33rd is the first one again."""

    @property
    def has_streams(self) -> bool:
        """Whether work continues after the call that started it has returned."""
        return self._module is not None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this device the thread's current one inside the block."""
        with self._module.device(self.device) if self.has_streams else contextlib.nullcontext():
            yield

    def stream_for(self, owner: object) -> Any:
        """Return a stream that nothing else in weightlane uses until `owner` is collected."""
        if not self.has_streams:
            return None
        try:
            stream = self._unused.pop()
        except IndexError:
            stream = self._module.Stream(self.device)
        weakref.finalize(owner, self._unused.append, stream).atexit = False
        return stream

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make this device and `stream`, one of its streams, the thread's current ones inside the block."""
        with self.current(), self._module.stream(stream) if self.has_streams else contextlib.nullcontext():
            yield

    def record_event(self, stream: Any = None) -> Any:
        """Return an event that passes when all work started so far on `stream` (default: the thread's current one) is done."""
        if not self.has_streams:
            return None
        with self.current():
            event = self._module.Event()
            event.record(self._module.current_stream(self.device) if stream is None else stream)
        return event

    def synchronize(self, stream: Any = None) -> None:
        """Wait until all work started so far on `stream` (default: the thread's current one) is done."""
        if self.has_streams:
            (self._module.current_stream(self.device) if stream is None else stream).synchronize()

    def wait_for(self, stream: Any, event: Any) -> None:
        """Make later work on `stream` wait for `event`, without blocking the thread. None stands for an event that has passed."""
        if event is not None:
            stream.wait_event(event)

    def record_stream(self, memory: torch.Tensor, stream: Any) -> None:
        """Keep torch from reusing `memory`, once its owner drops it, until the work started so far on `stream` is done."""
        if self.has_streams:
            memory.record_stream(stream)

    def empty_cache(self) -> None:
        """Return the unused memory that torch caches to the device."""
        if self.has_streams:
            with self.current():
                self._module.empty_cache()

    @property
    def name(self) -> str:
        """The manufacturer's name of the device; empty for the CPU."""
        return str(self._module.get_device_name(self.device)) if self.has_streams else ""

    def allocated_bytes(self) -> int:
        """Return how much of the device's memory torch has allocated in this process; 0 for the CPU."""
        return int(self._module.memory_allocated(self.device)) if self.has_streams else 0

    def free_bytes(self) -> int | None:
        """Return how much of the device's memory is free; None for the CPU."""
        return int(self._module.mem_get_info(self.device)[0]) if self.has_streams else None

    def memory_use(self) -> tuple[int, int]:
        """Return how much of an accelerator's memory all processes hold, and the most that torch reserved since the last call."""
        free, total = self._module.mem_get_info(self.device)
        peak = int(self._module.max_memory_reserved(self.device))
        self._module.reset_peak_memory_stats(self.device)
        return total - free, peak

    def register_host(self, address: int, nbytes: int, *, read_only: bool = False) -> bool:  # noqa: ARG002
        """Pin host memory, so that copies from and to the device need no staging copy; return whether that was possible."""
        return False

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`."""

    def register_while_used(self, owner: object, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Pin host memory as `register_host` does, until `owner`, which keeps the memory alive, is collected.

        The copies that use the memory must have ended before the last reference to `owner` is dropped.
        """
        if nbytes and self.register_host(address, nbytes, read_only=read_only):
            weakref.finalize(owner, self.unregister_host, address).atexit = False

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return host memory for copies to the device: 1-D uint8 zeros, pinned if the device has streams."""
        if not self.has_streams:
            return torch.zeros(nbytes, dtype=torch.uint8)
        owner = np.zeros(nbytes, dtype=np.uint8)
        self.register_while_used(owner, owner.ctypes.data, nbytes)
        return torch.from_numpy(owner).zero_()  # touches every page, even if pinning has not


class CudaRuntime(DeviceRuntime):
    """Runtime of a CUDA device."""

    def register_host(self, address: int, nbytes: int, *, read_only: bool = False) -> bool:
        """See `DeviceRuntime.register_host`."""
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        with self.current():
            if (failure := int(self._module.cudart().cudaHostRegister(address, nbytes, flags))) == 0:
                return True
            _say_unregistered(failure)
            # CUDA keeps the error and reports it for the next kernel of this process. This kernel takes the report.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.device)
        return False

    def unregister_host(self, address: int) -> None:
        """See `DeviceRuntime.unregister_host`."""
        with self.current():
            self._module.cudart().cudaHostUnregister(address)

    def interprocess_event(self) -> tuple[Any, bytes]:
        """Return an event that other processes can open, and its handle."""
        with self.current():  # torch makes the event, on the current device, when it is first asked for its handle
            event = self._module.Event(interprocess=True)
            return event, event.ipc_handle()

    def event_of(self, handle: bytes) -> Any:
        """Open the event of another process by its handle."""
        with self.current():
            return self._module.Event.from_ipc_handle(self.device, handle)

    def tensor_over(self, memory: Any) -> torch.Tensor:
        """Return a tensor over `memory`, which has a ``__cuda_array_interface__`` and is kept alive by the tensor."""
        with self.current():
            return torch.as_tensor(memory, device=self.device)

    def uuid(self) -> str:
        """Return the UUID of the physical device, which is the same in every process."""
        return str(self._module.get_device_properties(self.device).uuid)

    def can_reach(self, uuid: str) -> bool:
        """Tell whether this device can access the memory of the device `uuid`; True when that device is not visible here."""
        for index in range(self._module.device_count()):
            if index != self.device.index and str(self._module.get_device_properties(index).uuid) == uuid:
                return bool(self._module.can_device_access_peer(self.device.index, index))
        return True


@functools.cache
def _say_unregistered(failure: int) -> None:
    """Warn once for each error code with which CUDA refuses to register host memory: nothing fails, but every copy is slower."""
    _log.warning(
        "CUDA does not register host memory (error %d), so copies to and from it are several times slower: raise the limit of"
        " locked memory (ulimit -l; in a container --ulimit memlock=-1), or give the machine more free memory.",
        failure,
    )


@functools.cache
def runtime_of(device: torch.device) -> DeviceRuntime:
    """Return the runtime of `device`.

    Raises `ConfigError` for an accelerator without index, or RuntimeError if torch has no such devices.
    """
    device = checked_device(device)
    if device == HOST:
        return DeviceRuntime(HOST)
    kind = CudaRuntime if device.type == "cuda" else DeviceRuntime
    return kind(device, torch.get_device_module(device))


def buffer_device(devices: Collection[str], preferred: torch.device | None, part: str) -> torch.device:
    """Return `preferred`, the device of the weights, if it is of the `devices` whose memory an engine carries, else the CPU.

    Raises `ConfigError` when the engine carries neither memory, or when `preferred` is an accelerator without index.
    """
    if preferred is not None and preferred.type in devices:
        return checked_device(preferred, part)
    if HOST.type in devices:
        return HOST
    where = "on no device that was named" if preferred is None else f"on {preferred}"
    raise ConfigError(
        f"the weights are {where}, and the engine carries {' and '.join(sorted(devices))} memory only.",
        part=part,
        hint="Choose an engine that carries the memory in which the weights are: checkpoint_engine.backend.",
    )


def numbered_device(device_type: str, number: int = 0) -> torch.device:
    """Return the device of that torch device type and `number`. There is only one CPU."""
    return HOST if device_type == HOST.type else torch.device(device_type, number)


def device_count(device_type: str) -> int:
    """Return how many devices of that torch device type this machine has; 1 for the CPU."""
    if device_type == HOST.type:
        return 1
    return int(torch.get_device_module(device_type).device_count()) if is_available(device_type) else 0


def is_available(device_type: str) -> bool:
    """Tell whether this machine has a device of that torch device type."""
    if device_type == HOST.type:
        return True
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except (RuntimeError, AttributeError):
        return False
