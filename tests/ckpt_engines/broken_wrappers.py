"""What the broken engines are made of: wrappers around engines that are right, mostly around `shm`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from weightlane.ckpt_engines import WeightReceiver, WeightSender
from weightlane.ckpt_engines.filesystem import FilesystemEngine
from weightlane.ckpt_engines.shm import ShmEngine
from weightlane.ckpt_engines.torch_distributed import GlooEngine

FOREVER_S = 3600.0
SHARED_MEMORY_PREFIX = "broken-engine-"


class Half:
    """Hands every call on to the half of a right engine."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.kept: dict[Any, Any] = {}
        """For what a defect remembers."""

    def around(self, call: str, *arguments: Any) -> Any:
        """All calls come by here; a deadline is the last argument."""
        return getattr(self.real, call)(*arguments)


def _half(contract: type) -> type[Half]:
    def handing_on(call: str) -> Callable[..., Any]:
        return lambda self, *arguments: self.around(call, *arguments)

    calls = [name for name, _ in inspect.getmembers(contract, inspect.isfunction) if not name.startswith("_")]
    return type(contract.__name__, (Half, contract), {call: handing_on(call) for call in calls})


Sender: Any = _half(WeightSender)
Receiver: Any = _half(WeightReceiver)


class Wrapped:
    """Puts `sender` and `receiver` around an engine's halves."""

    sender: ClassVar[type[Half]] = Sender
    receiver: ClassVar[type[Half]] = Receiver

    def make_sender(self, name: str) -> Any:
        return self.sender(super().make_sender(name))  # type: ignore[misc]

    def make_receiver(self, name: str) -> Any:
        return self.receiver(super().make_receiver(name))  # type: ignore[misc]


class Healthy(Wrapped, ShmEngine):
    """Passes everything."""


class HealthyGloo(Wrapped, GlooEngine):
    """Passes everything."""


class HealthyStore(Wrapped, FilesystemEngine):
    """Passes everything."""


def engine_with(half: type[Half], of: type = Healthy) -> type:
    """The healthy engine with `half` in the place of its sender or its receiver. Decorates that half."""
    return type(half.__name__, (of,), {"sender" if issubclass(half, Sender) else "receiver": half})


def broken(call: str, of: type = Healthy) -> Callable[[Callable[..., Any]], type]:
    """Decorates what a half does at `call`, such as ``sender.send``: of the half, the right call, and its arguments."""
    side, _, name = call.partition(".")

    def engine(does: Callable[..., Any]) -> type:
        def method(self: Half, *arguments: Any) -> Any:
            return does(self, getattr(super(half, self), name), *arguments)

        half = type(does.__name__, (getattr(of, side),), {name: method})
        return engine_with(half, of)

    return engine


def declaring(of: type[Any] = Healthy, **changes: Any) -> type:
    """The healthy engine with other capabilities."""
    return type("Declaring", (of,), {"capabilities": replace(of.capabilities, **changes)})
