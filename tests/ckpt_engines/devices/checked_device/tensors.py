"""Tensors on simulated devices, and what stands for torch's module of such a device."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from .streams import SAME_STREAM, WRONG_DEVICE, Block, Event, Operation, Stream
from .world import World

_VIEWS = {
    "view", "__getitem__", "detach", "as_strided", "reshape", "narrow", "alias", "squeeze", "unsqueeze", "flatten",
}  # fmt: skip
_WAITED_FOR = {
    "tolist", "item", "cpu", "numpy", "__int__", "__bool__", "__float__", "equal", "nonzero", "__getitem__",
}  # fmt: skip
_FACTS = {
    "dim", "numel", "size", "stride", "data_ptr", "storage_offset", "is_contiguous", "element_size", "untyped_storage",
    "__get__", "__len__", "__repr__", "__format__", "__hash__", "requires_grad_", "is_pinned", "is_floating_point",
}  # fmt: skip


MOST_STREAMS = 32
"""torch's pool of a CUDA device; seen on an H200 with torch 2.11: 80 streams that were asked for are 32."""


class CheckedTensor(torch.Tensor):
    """A tensor in the memory of a simulated device. What is done with it goes through this thread's current stream."""

    world: World
    block: Block

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.world_type, self.block.device)

    @property
    def world_type(self) -> str:
        return Devices.kind

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return Devices.kind == "cuda"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def data_ptr(self) -> int:
        return self.block.address + self.storage_offset() * self.element_size()

    def record_stream(self, stream: Stream) -> None:
        """Note that `stream` uses the tensor's block, like torch's `Tensor.record_stream`."""
        self.block.recorded.add(stream.number)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on a stream, or look at the result as a view."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _FACTS:
            return super().__torch_function__(func, types, args, kwargs)
        if name in _VIEWS and next(_tensors(args[1:]), None) is None:
            whole = args[0]
            with torch._C.DisableTorchFunctionSubclass():
                plain = func(*[_plain(each) for each in args], **kwargs)
            return _wrap(plain, whole.world, whole.block)
        return _run(name, func, args, kwargs)


def _plain(value: Any) -> Any:
    if isinstance(value, CheckedTensor):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, list | tuple):
        return type(value)(_plain(each) for each in value)
    return value


def _wrap(plain: torch.Tensor, world: World, block: Block) -> CheckedTensor:
    made = plain.as_subclass(CheckedTensor)
    made.world, made.block = world, block
    return made


def _tensors(value: Any) -> Iterator[CheckedTensor]:
    if isinstance(value, CheckedTensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _range(tensor: CheckedTensor) -> tuple[int, int]:
    with torch._C.DisableTorchFunctionSubclass():
        size = tensor.element_size()
        start = tensor.storage_offset() * size
        extent = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return start, start + (extent + 1) * size if tensor.numel() else start


def _run(name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the current stream: in place, or with a result of its own. The host waits for some."""
    operands = [*_tensors(args), *_tensors(list(kwargs.values()))]
    world, device = operands[0].world, operands[0].block.device
    stream = world.current_stream(device)
    for operand in operands:
        if operand.block.device != device:
            world.violate(WRONG_DEVICE, f"{name} takes tensors of devices {device} and {operand.block.device}")
    options = {key: _plain(value) for key, value in kwargs.items() if key != "non_blocking"}
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        result = func(*[_plain(each) for each in args], **options)
    operation = stream.put(name)
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    into = kwargs["out"] if "out" in kwargs else args[0] if in_place else None
    for operand in operands:
        world.access(operation, operand.block, *_range(operand), writes=operand is into)
    into_host = in_place and not isinstance(into, CheckedTensor)
    if into_host or name in _WAITED_FOR:
        stream.synchronize()
    if into is None and name not in _WAITED_FOR - {"nonzero", "__getitem__"}:
        return _made(world, device, result, operation)
    return result if into is None else into


def _made(world: World, device: int, value: torch.Tensor, operation: Operation | None) -> CheckedTensor:
    """`value` in fresh memory of a device, written by `operation`; None for memory whose content is garbage."""
    nbytes = value.numel() * value.element_size()
    block = world.allocate(device, nbytes)
    plain = over(world, block).as_subclass(torch.Tensor)[:nbytes].view(value.dtype).view(value.shape)
    tensor = _wrap(plain, world, block)
    if operation is not None:
        plain.copy_(value)
        world.access(operation, block, *_range(tensor), writes=True)
    return tensor


def on_device(world: World, device: int, value: torch.Tensor, *, garbage: bool = False) -> CheckedTensor:
    """`value` in fresh memory of a device, put there by an operation unless it is to be `garbage`."""
    return _made(world, device, value, None if garbage else world.current_stream(device).put("copy"))


class _Owner(np.ndarray[Any, np.dtype[np.uint8]]):
    """Lives for as long as any tensor looks at a block, and keeps what has to live as long."""

    keeps: object = None


def over(world: World, block: Block, keeps: object = None) -> CheckedTensor:
    """All of a block as uint8. torch's memory is given back when no tensor looks at it any more."""
    owner = np.frombuffer(block.raw, dtype=np.uint8).view(_Owner)
    owner.keeps = keeps
    plain = torch.from_numpy(owner)
    if block.stream is not None:
        world.watch(block, owner)
    return _wrap(plain, world, block)


class Devices:
    """Stands for ``torch.cuda`` or ``torch.npu``."""

    kind = "cuda"

    def __init__(self, world: World) -> None:
        self._world = world
        self._made: Counter[int] = Counter()

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._world.devices

    def current_device(self) -> int:
        return self._world.current_device

    def device(self, device: torch.device | int) -> Any:
        return self._world.on_device(_index(device))

    def stream(self, stream: Stream) -> Any:
        return self._world.on_stream(stream)

    def current_stream(self, device: torch.device | int | None = None) -> Stream:
        return self._world.current_stream(self._world.current_device if device is None else _index(device))

    def Stream(self, device: torch.device | int) -> Stream:  # noqa: N802 - torch's name
        """A stream of the device. torch has a number of them, and gives the first one again after the last."""
        self._made[_index(device)] += 1
        if self._made[_index(device)] > MOST_STREAMS:
            self._world.violate(
                SAME_STREAM, f"stream {self._made[_index(device)]} of device {_index(device)} is the first"
            )
        return self._world.stream(_index(device))

    @property
    def Event(self) -> Any:  # noqa: N802 - torch's name
        world = self._world

        class Made(Event):
            def __init__(self, *, interprocess: bool = False) -> None:
                super().__init__(world)
                del interprocess

            @staticmethod
            def from_ipc_handle(_device: torch.device, handle: bytes) -> Event:
                return world.by_handle(handle)

        return Made

    def empty_cache(self) -> None:
        """There is none."""

    def get_device_properties(self, device: torch.device | int) -> Any:

        class Properties:
            uuid = f"device-{_index(device)}"

        return Properties()

    def can_device_access_peer(self, _mine: int, _theirs: int) -> bool:
        return True


def _index(device: torch.device | int) -> int:
    index = device if isinstance(device, int) else device.index
    assert index is not None, "a device without index"
    return index


@contextlib.contextmanager
def installed(world: World, kind: str) -> Iterator[Devices]:
    """Have torch, and weightlane, know the world's devices as those of a type."""
    from weightlane.ckpt_engines.runtime import devices as ours

    # torch keeps the set of functions that a device context reaches from the first call under one. Made from the
    # functions that are put in place here, it would leave out torch's own for as long as the process lives.
    with torch.device("meta"):
        torch.empty(0)
    module = Devices(world)
    patch = pytest.MonkeyPatch()
    patch.setattr(Devices, "kind", kind)
    real_module = torch.get_device_module

    def device_module(device: Any = None) -> Any:
        return module if torch.device(device).type == kind else real_module(device)

    patch.setattr(torch, "get_device_module", device_module)
    for name in ("empty", "zeros", "full", "arange", "ones"):
        patch.setattr(torch, name, _factory(world, kind, getattr(torch, name)))

    real_to = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = next((torch.device(each) for each in args if isinstance(each, torch.device | str)), None)
        if target is None:
            return real_to(tensor, *args, **kwargs)
        others = [each for each in args if not isinstance(each, torch.device | str)]
        if target.type != kind:
            return real_to(tensor.cpu() if isinstance(tensor, CheckedTensor) else tensor, *args, **kwargs)
        if isinstance(tensor, CheckedTensor):
            assert tensor.device == target, "copies between devices are not simulated"
            return real_to(tensor, *others, **kwargs) if others else tensor
        return on_device(world, _index(target), real_to(tensor, *others, **kwargs) if others else tensor)

    patch.setattr(torch.Tensor, "to", to)

    def tensor_over(_: Any, memory: Any) -> torch.Tensor:
        return over(world, world.find(memory.pointer)[0], keeps=memory)

    patch.setattr(ours.CudaRuntime, "tensor_over", tensor_over)
    ours.runtime_of.cache_clear()
    try:
        yield module
    finally:
        patch.undo()
        ours.runtime_of.cache_clear()


def _factory(world: World, kind: str, real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != kind:
            return real(*args, **({} if device is None else {"device": device}), **kwargs)
        return on_device(world, _index(torch.device(device)), real(*args, **kwargs), garbage=real.__name__ == "empty")

    return make
