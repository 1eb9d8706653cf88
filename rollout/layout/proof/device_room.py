"""Makes room for a second model on a device, by moving the first model's weights to host memory for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weightlane.ckpt_engines import ConfigError

from .model_tensors import tensors_of

_ROOM = 1.3
"""Free memory that a second model needs, in sizes of the first; it covers what layers allocate temporarily after a load."""


@contextmanager
def room_for_second(model: torch.nn.Module, device: torch.device, *, may_move: bool) -> Iterator[None]:
    """Inside, `device` has memory for a second model. The weights of `model` wait in host memory if they `may_move`.

    Raises:
        ConfigError: The device has no room, and the weights may not move.
        RuntimeError: The host has no room for the weights.
    """
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage()
        for tensor in tensors_of(model).values()
        if tensor.device.type == device.type
    }
    nbytes = sum(storage.nbytes() for storage in storages.values())
    if device.type == "cpu" or torch.accelerator.get_memory_info(device)[0] > nbytes * _ROOM:
        yield
        return
    if not may_move:
        raise ConfigError(
            f"a second model of {nbytes / 1e9:.1f} GB has no room on {device} next to this one, which serves.",
            part="rehearsal",
            hint="The trainer sends other tensors or dtypes than when the replica was started; send those again.",
        )
    with set_aside(list(storages.values())):
        torch.accelerator.empty_cache()
        try:
            yield
        finally:
            gc.collect()
            torch.accelerator.empty_cache()


@contextmanager
def set_aside(storages: list[torch.UntypedStorage]) -> Iterator[None]:
    """Inside, `storages` use no device memory. Afterwards they have their bytes again, for all views of them.

    Raises:
        RuntimeError: The host has no room for the bytes; nothing has changed.
        LostWeightsError: The bytes could not be restored.
    """
    moved = []
    for storage in storages:
        values = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
        moved.append((storage, storage.nbytes(), values.copy_(storage)))
    try:
        for storage, _, _ in moved:
            storage.resize_(0)
        yield
    finally:
        try:
            for storage, nbytes, values in moved:
                storage.resize_(nbytes)
                storage.copy_(values)
        except Exception as cause:
            raise LostWeightsError(f"the model's weights could not be restored on their device: {cause}") from cause


class LostWeightsError(BaseException):
    """A model has lost its weights. The class is no `Exception`, since the process must not continue."""
