"""`GraphMemory`: whether the weights are still in the memory that captured CUDA graphs read.

A graph reads addresses. A version that is written to other memory, by a layer that replaces a parameter instead of filling it,
would be a version that nothing computes with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from weightlane.ckpt_engines import QuarantinedError


class GraphMemory:
    """Where the parameters and buffers of a model are. Made when the model serves, since layers may still move some before.

    Args:
        model: The model.
        part: Name of this rank for errors.
    """

    def __init__(self, model: torch.nn.Module, part: str) -> None:
        self._model, self._part = model, part
        self._addresses = dict(_addresses(model))

    def check(self) -> None:
        """Raise `QuarantinedError` if a tensor is elsewhere."""
        here = dict(_addresses(self._model))
        moved = [name for name, address in self._addresses.items() if here.get(name) != address]
        if moved:
            raise QuarantinedError(
                f"{moved[0]} and {len(moved) - 1} more tensors have moved to other memory, and captured CUDA graphs compute with"
                " the memory from before.",
                part=self._part,
                hint="Start this replica anew; with --enforce-eager (rollout.extra_engine_args) tensors may move.",
            )


def captures_graphs(vllm_config: Any) -> bool:
    """Whether an engine with this configuration captures CUDA graphs."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return mode is not None and mode.name != "NONE"


def _addresses(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            if tensor.numel():
                yield name, tensor.data_ptr()
