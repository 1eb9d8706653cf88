"""What differs between a CPU, a CUDA device and an NPU for whoever moves bytes: which one is meant, streams, events, host memory.

A thread has a current device, and it is number 0 in a new one, whatever the thread that started it had. So nobody here asks for
the current device: a device is said, with its index, and whatever touches it does so inside `DeviceRuntime.current` or on a
stream.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from .errors import ConfigError

HOST = torch.device("cpu")


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
    """Of one device. This class is that of the CPU, where everything is done when the call that does it returns.

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

    def finish(self, stream: Any) -> None:
        """Have this thread wait until what has been started on `stream` is done."""

    def wait_for(self, stream: Any, event: Any) -> None:
        """What is started on `stream` from now on begins when `event` has passed; a thread does not wait. None has passed."""

    def keep_until_done(self, memory: torch.Tensor, stream: Any) -> None:
        """Nobody else gets `memory` before what was started on `stream` so far is done with it, though its owner drops it."""

    def forget_unused(self) -> None:
        """Give memory back to the device that torch keeps for later."""

    def register_host(self, address: int, nbytes: int) -> bool:  # noqa: ARG002
        """Lock host memory, so that copies from and to the device need none in between; whether that was possible."""
        return False

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`."""


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

    def finish(self, stream: Any) -> None:
        """See `DeviceRuntime.finish`."""
        stream.synchronize()

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


class CudaRuntime(AcceleratorRuntime):
    """Of a CUDA device."""

    def register_host(self, address: int, nbytes: int) -> bool:
        """See `DeviceRuntime.register_host`."""
        with self.current():
            return int(self._module.cudart().cudaHostRegister(address, nbytes, 0)) == 0

    def unregister_host(self, address: int) -> None:
        """See `DeviceRuntime.unregister_host`."""
        with self.current():
            self._module.cudart().cudaHostUnregister(address)

    def interprocess_event(self) -> Any:
        """An event that other processes can open by its ``ipc_handle``."""
        with self.current():
            return self._module.Event(interprocess=True)

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


def is_available(device_type: str) -> bool:
    """Whether this machine has a device of that torch device type."""
    if device_type == HOST.type:
        return True
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except (RuntimeError, AttributeError):
        return False
