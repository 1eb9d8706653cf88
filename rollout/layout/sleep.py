"""The tensors of a sleeping model: those that the next version writes completely, and copies of all others.

An engine that sleeps frees the memory of its model. Versions do not have everything that was there: tables of rotary embeddings,
scales, tensors of layers that go through vLLM's own loading. Only memory of which a version writes every byte may be lost.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from .map.coverage import target_coverage
from .proof.model_tensors import tensors_of
from .write_method import WriteMethod


def replaced_storages(model: torch.nn.Module, method: WriteMethod) -> dict[int, torch.UntypedStorage]:
    """Return the storages of `model` of which every version that is written by `method` writes every byte, by torch's ids.

    Tensors that go through vLLM's own loading do not count, nor does a storage that is larger than the tensor that is written.
    """
    live = dict((*model.named_parameters(), *model.named_buffers()))
    found = {}
    for name, counts in target_coverage(method.layout).items():
        storage = live[name].untyped_storage()
        if not counts.unmapped and storage.nbytes() == live[name].numel() * live[name].itemsize:
            found[storage._cdata] = storage
    return found


class KeptTensors:
    """Copies, in the host's memory, of all tensors of `model` whose storages are not among `replaced`, by torch's ids."""

    def __init__(self, model: torch.nn.Module, replaced: Collection[int]) -> None:
        self._copies = [
            (tensor, tensor.detach().to("cpu", copy=True))
            for tensor in tensors_of(model).values()
            if tensor.numel() and not tensor.is_meta and tensor.untyped_storage()._cdata not in replaced
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies into the tensors, whose memory is there again."""
        for tensor, copy in self._copies:
            tensor.data.copy_(copy)
        self._copies = []
