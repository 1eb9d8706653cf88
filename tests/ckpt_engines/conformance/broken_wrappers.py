"""Wrappers that build broken engines around working ones, mostly around `shm`."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from weightlane.ckpt_engines import Bucket, Deadline, StoringSender, ViewableSender, ViewingReceiver
from weightlane.ckpt_engines.engines.filesystem.engine import FilesystemEngine
from weightlane.ckpt_engines.engines.shared_memory.shm import ShmEngine
from weightlane.ckpt_engines.engines.torch_distributed.gloo import GlooEngine
from weightlane.ckpt_engines.links import ReceiverLink, SenderLink

FOREVER_S = 3600.0
SHARED_MEMORY_PREFIX = "broken-engine-"
Call = Callable[..., Any]
"""A call of the right engine, which a defect makes or leaves out."""


class Half:
    """Hands every call on to the half of a right engine."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.kept: dict[Any, Any] = {}
        """For what a defect remembers."""

    def around(self, call: str, *arguments: Any) -> Any:
        """All calls come by here. Optional ones that the right engine has not do nothing."""
        does = getattr(self.real, call, None)
        return does(*arguments) if does is not None else None


def _half(*contracts: type) -> type[Half]:
    def handing_on(call: str) -> Callable[..., Any]:
        return lambda self, *arguments: self.around(call, *arguments)

    functions = [name for contract in contracts for name, _ in inspect.getmembers(contract, inspect.isfunction)]
    calls = {name: handing_on(name) for name in functions if not name.startswith("_")}
    return type(contracts[0].__name__, (Half, *contracts), calls)


Sender: Any = _half(ViewableSender, StoringSender)
_Receiver: Any = _half(ViewingReceiver)


class Receiver(_Receiver):  # type: ignore[misc]
    """Knows which buckets are under way, and so has one call more: `arrived`."""

    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self.under_way: deque[Bucket] = deque()

    def post(self, bucket: Bucket, sender: str) -> None:
        super().post(bucket, sender)
        self.under_way.append(bucket)

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        super().flush(deadline, pending)
        while len(self.under_way) > pending:
            self.arrived(self.under_way.popleft())

    def arrived(self, bucket: Bucket) -> None:
        """`bucket` has arrived, and its receiver is about to be told so."""


class Wrapped:
    """Puts `sender` and `receiver` around an engine's halves."""

    sender: ClassVar[type[Half]] = Sender
    receiver: ClassVar[type[Half]] = Receiver

    def make_sender(self, name: str, device: torch.device) -> Any:
        return self.sender(super().make_sender(name, device))  # type: ignore[misc]

    def make_receiver(self, name: str, device: torch.device) -> Any:
        return self.receiver(super().make_receiver(name, device))  # type: ignore[misc]


class Healthy(Wrapped, ShmEngine):
    """Passes everything."""


class HealthyGloo(Wrapped, GlooEngine):
    """Passes everything."""


class HealthyStore(Wrapped, FilesystemEngine):
    """Passes everything."""


def engine_with(half: type[Half], of: type = Healthy) -> type:
    """The healthy engine with `half` in the place of its sender or its receiver. Decorates that half."""
    return type(half.__name__, (of,), {"sender" if issubclass(half, Sender) else "receiver": half})


def _doing(does: Callable[..., Any], call: str, of: type) -> type:
    """`of`, which at `call` does what `does` does: of itself, the right call, and its arguments."""

    def method(self: Any, *arguments: Any) -> Any:
        return does(self, getattr(super(changed, self), call), *arguments)

    changed = type(does.__name__, (of,), {call: method})
    return changed


def broken(call: str, of: type = Healthy) -> Callable[[Callable[..., Any]], type]:
    """Decorates what a half does at `call`, such as ``sender.flush``; see `_doing`."""
    side, _, name = call.partition(".")
    return lambda does: engine_with(_doing(does, name, getattr(of, side)), of)


def broken_link(*calls: str) -> Callable[[Callable[..., Any]], type]:
    """Decorate what links do at `calls`, as `broken` does for a half. Only a link can break what the framework does itself."""

    def engine(does: Callable[..., Any]) -> type:
        links: dict[str, type] = {"sender": SenderLink, "receiver": ReceiverLink}
        for call in calls:
            side, _, name = call.partition(".")
            links[side] = _doing(does, name, links[side])
        return type(
            does.__name__, (Healthy,), {"link_types": {SenderLink: links["sender"], ReceiverLink: links["receiver"]}}
        )

    return engine


def declaring(of: type[Any] = Healthy, **changes: Any) -> type:
    """The healthy engine with other capabilities."""
    return type("Declaring", (of,), {"capabilities": replace(of.capabilities, **changes)})
