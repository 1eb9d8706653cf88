"""`DeviceRuntime`: streams, events and memory of a CPU, a CUDA device or an NPU, for code that moves bytes.

A thread has a current device, and it is number 0 in a new one, whatever the thread that started it had. So nobody here asks for
the current device: a device is said, with its index, and whatever touches it does so inside `DeviceRuntime.current` or on a
stream.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError

HOST = torch.device("cpu")
_PORTABLE, _READ_ONLY = 1, 8
"""``cudaHostRegisterPortable``, for every device of the process; ``cudaHostRegisterReadOnly``, for pages mapped to be read."""


def checked_device(device: torch.device | str, part: str = "device") -> torch.device:
    """`device`; `ConfigError` for an accelerator without an index, which would mean whatever is current in some thread."""
    device = torch.device(device)
    if device.type == HOST.type:
        return HOST
    if device.index is None:
        raise ConfigError(
            f"{device.type} is not one device.", part=part, hint=f"Say which one, such as {device.type}:0."
        )
    return device


class DeviceRuntime:
    """Streams, events and host memory of one device. This class: the CPU, whose calls have done everything when they return.

    Streams and events are None there. Use `runtime_of` instead of making one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def has_streams(self) -> bool:
        """Whether work goes on after the call that started it has returned."""
        return False

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make it this thread's current device."""
        yield

    def new_stream(self) -> Any:
        """A stream of its own, which waits for no other."""
        return None

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:  # noqa: ARG002
        """Make it this thread's current device, and `stream` (one of it) its current stream."""
        yield

    def recorded(self, stream: Any = None) -> Any:  # noqa: ARG002
        """An event behind what has been started so far on `stream`, or on the stream that is current in this thread."""
        return None

    def finish(self, stream: Any = None) -> None:
        """Have this thread wait until what has been started on `stream`, or on the stream that is current in it, is done."""

    def wait_for(self, stream: Any, event: Any) -> None:
        """What is started on `stream` from now on begins when `event` has passed; a thread does not wait. None has passed."""

    def keep_until_done(self, memory: torch.Tensor, stream: Any) -> None:
        """Nobody else gets `memory` before what was started on `stream` so far is done with it, though its owner drops it."""

    def forget_unused(self) -> None:
        """Give memory back to the device that torch keeps for later."""

    @property
    def name(self) -> str:
        """What the device's maker calls it; empty for the CPU."""
        return ""

    def allocated_bytes(self) -> int:
        """Memory of the device that this process has from torch; 0 for the CPU."""
        return 0

    def free_bytes(self) -> int | None:
        """Memory of the device that nobody has; None for the CPU."""
        return None

    def register_host(self, address: int, nbytes: int, *, read_only: bool = False) -> bool:  # noqa: ARG002
        """Lock host memory, so that copies from and to the device need none in between; whether that was possible."""
        return False

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`."""

    def register_while_used(self, owner: object, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """As `register_host`, until `owner`, which keeps the memory, is about to be gone. On a CPU nothing happens.

        Whoever lets go of `owner` has waited for the copies that use the memory.
        """
        if nbytes and self.register_host(address, nbytes, read_only=read_only):
            weakref.finalize(owner, self.unregister_host, address).atexit = False

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Host memory to copy from to the device: 1-D uint8, zeros. It is registered where there is a device that needs it."""
        if not self.has_streams:
            return torch.zeros(nbytes, dtype=torch.uint8)
        owner = np.zeros(nbytes, dtype=np.uint8).view(_Owner)
        self.register_while_used(owner, owner.ctypes.data, nbytes)
        return torch.from_numpy(owner).zero_()  # which touches every page, where registering has not


class _Owner(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory that is alive as long as a tensor looks at it. An array of numpy's own class cannot say when it goes."""


class AcceleratorRuntime(DeviceRuntime):
    """Of a device with streams; `module` is torch's own for its type, such as ``torch.cuda``."""

    def __init__(self, device: torch.device, module: Any) -> None:
        super().__init__(device)
        self._module = module

    @property
    def has_streams(self) -> bool:
        """See `DeviceRuntime.has_streams`."""
        return True

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """See `DeviceRuntime.current`."""
        with self._module.device(self.device):
            yield

    def new_stream(self) -> Any:
        """See `DeviceRuntime.new_stream`."""
        return self._module.Stream(self.device)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """See `DeviceRuntime.on`."""
        with self.current(), self._module.stream(stream):
            yield

    def recorded(self, stream: Any = None) -> Any:
        """See `DeviceRuntime.recorded`."""
        with self.current():
            event = self._module.Event()
            event.record(self._module.current_stream(self.device) if stream is None else stream)
        return event

    def finish(self, stream: Any = None) -> None:
        """See `DeviceRuntime.finish`."""
        (self._module.current_stream(self.device) if stream is None else stream).synchronize()

    def wait_for(self, stream: Any, event: Any) -> None:
        """See `DeviceRuntime.wait_for`."""
        if event is not None:
            stream.wait_event(event)

    def keep_until_done(self, memory: torch.Tensor, stream: Any) -> None:
        """See `DeviceRuntime.keep_until_done`."""
        memory.record_stream(stream)

    def forget_unused(self) -> None:
        """See `DeviceRuntime.forget_unused`."""
        with self.current():
            self._module.empty_cache()

    @property
    def name(self) -> str:
        """See `DeviceRuntime.name`."""
        return str(self._module.get_device_name(self.device))

    def allocated_bytes(self) -> int:
        """See `DeviceRuntime.allocated_bytes`."""
        return int(self._module.memory_allocated(self.device))

    def free_bytes(self) -> int | None:
        """See `DeviceRuntime.free_bytes`."""
        return int(self._module.mem_get_info(self.device)[0])


class CudaRuntime(AcceleratorRuntime):
    """Of a CUDA device."""

    def register_host(self, address: int, nbytes: int, *, read_only: bool = False) -> bool:
        """See `DeviceRuntime.register_host`."""
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        with self.current():
            if int(self._module.cudart().cudaHostRegister(address, nbytes, flags)) == 0:
                return True
            # CUDA keeps the error, and the next kernel that is started, whosever it is, would be said to have failed with it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.device)
        return False

    def unregister_host(self, address: int) -> None:
        """See `DeviceRuntime.unregister_host`."""
        with self.current():
            self._module.cudart().cudaHostUnregister(address)

    def interprocess_event(self) -> tuple[Any, bytes]:
        """An event that other processes can open, and the handle by which they do."""
        with self.current():  # torch makes the event, on the current device, when it is first asked for its handle
            event = self._module.Event(interprocess=True)
            return event, event.ipc_handle()

    def event_of(self, handle: bytes) -> Any:
        """The event that another process has made, by its handle."""
        with self.current():
            return self._module.Event.from_ipc_handle(self.device, handle)

    def tensor_over(self, memory: Any) -> torch.Tensor:
        """Memory that the driver has given, by its ``__cuda_array_interface__``, as a tensor that keeps it alive."""
        with self.current():
            return torch.as_tensor(memory, device=self.device)

    def uuid(self) -> str:
        """Which physical device it is, in words that mean the same in every process."""
        return str(self._module.get_device_properties(self.device).uuid)

    def can_reach(self, uuid: str) -> bool:
        """Whether it can access the memory of the physical device `uuid`; of one that is not visible here nobody knows."""
        for index in range(self._module.device_count()):
            if index != self.device.index and str(self._module.get_device_properties(index).uuid) == uuid:
                return bool(self._module.can_device_access_peer(self.device.index, index))
        return True


@functools.cache
def runtime_of(device: torch.device) -> DeviceRuntime:
    """The runtime of `device`, an accelerator with its index.

    Raises `ConfigError` without the index, or RuntimeError if torch has no such devices.
    """
    device = checked_device(device)
    if device == HOST:
        return DeviceRuntime(HOST)
    kind = CudaRuntime if device.type == "cuda" else AcceleratorRuntime
    return kind(device, torch.get_device_module(device))


def numbered_device(device_type: str, number: int = 0) -> torch.device:
    """A device of a type by its number, by default the first; the CPU has just one."""
    return HOST if device_type == HOST.type else torch.device(device_type, number)


def device_count(device_type: str) -> int:
    """How many devices of that type this machine has; one CPU."""
    if device_type == HOST.type:
        return 1
    return int(torch.get_device_module(device_type).device_count()) if is_available(device_type) else 0


def is_available(device_type: str) -> bool:
    """Whether this machine has a device of that torch device type."""
    if device_type == HOST.type:
        return True
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except (RuntimeError, AttributeError):
        return False


def usable_cpus() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
