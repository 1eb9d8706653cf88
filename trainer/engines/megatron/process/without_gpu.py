"""Run megatron-core on a machine without a GPU, for development and tests, or build a model without data.

megatron-core takes a CUDA device for granted: it allocates on ``"cuda"``, asks for streams, and compares the names of tensor
types. While `cuda_calls_on` is entered, those calls are answered on another device. Everything that computes or communicates is
megatron-core's own code, over gloo. Where there is a GPU, this is used only to build a model without data.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

_log = logging.getLogger(__name__)
_entering = threading.Lock()
_said: list[bool] = []


@contextlib.contextmanager
def cuda_calls_on(device: torch.device) -> Iterator[None]:
    """Answer megatron-core's CUDA calls on `device` inside the block. One thread at a time.

    On the CPU, of a machine without a CUDA device, everything is computed, and a warning is logged once per process. On the meta
    device tensors have no data.
    """
    if device.type == "cpu" and not _said:
        _said.append(True)
        _log.warning("no CUDA device here: megatron-core runs on the CPU over gloo, for development and tests only")
    with _entering, contextlib.ExitStack() as stack:
        for owner, name, value in _replacements(device):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(_CudaTensorsOn(device))
        yield


class _CudaTensorsOn(TorchFunctionMode):
    """Creates tensors on another device when a CUDA device is requested, and reports a CUDA tensor's type name for them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # pinning needs a GPU
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizers sort parameters by "torch.cuda.FloatTensor" and the like.
            return f"torch.cuda.{str(func(*args)).rpartition('.')[2]}"
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = self._device
        return func(*args, **kwargs)


class _Stream:
    """A stand-in for a CUDA stream or event, for work that is done when its call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any) -> _Stream:
        return self

    def _nothing(self, *_: Any) -> None:
        pass

    wait = wait_stream = wait_event = record = synchronize = _nothing


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    **options: Any,
) -> Any:
    """Call torch's all-to-all with split sizes as lists: unlike NCCL, gloo takes no tensors there."""

    def sizes(splits: Any) -> Any:
        return splits.tolist() if hasattr(splits, "tolist") else splits

    return _torch_all_to_all_single(output, input, sizes(output_split_sizes), sizes(input_split_sizes), **options)


_torch_all_to_all_single = dist.all_to_all_single


def _replacements(device: torch.device) -> list[tuple[Any, str, Any]]:
    """List the functions that would initialise CUDA, and their replacements: (module, name, value)."""
    cuda: Any = torch.cuda
    return [
        (cuda, "current_device", lambda: device),
        (cuda, "synchronize", lambda *_, **__: None),
        (cuda, "Stream", _Stream),
        (cuda, "Event", _Stream),
        (cuda, "current_stream", lambda *_: _Stream()),
        (cuda, "default_stream", lambda *_: _Stream()),
        (cuda, "stream", lambda _: contextlib.nullcontext()),
        (cuda, "get_rng_state", _get_rng_state),
        (cuda, "set_rng_state", _set_rng_state),
        (cuda, "manual_seed", _manual_seed),
        (cuda, "initial_seed", torch.initial_seed),
        (cuda.random, "get_rng_state", _get_rng_state),
        (megatron_random, "_get_cuda_rng_state", _get_rng_state),
        (megatron_random, "_set_cuda_rng_state", _set_rng_state),
        (dist, "all_to_all_single", _all_to_all_single),
    ]
