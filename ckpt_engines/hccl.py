"""The ``hccl`` engine: Ascend NPU memory over HCCS or RoCE, by torch.distributed and torch_npu."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from ._collective_halves import CollectiveReceiver, CollectiveSender
from ._group_engine import GroupEngine
from .contract import Capabilities, Delivery, WeightReceiver, WeightSender
from .devices import is_available


class HcclEngine(GroupEngine):
    """Ascend NPU memory over HCCS or RoCE."""

    backend = "hccl"
    capabilities = Capabilities(
        devices=frozenset({"npu"}),
        delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}),
        collective=True,
        channels=False,
    )

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed"
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            return f"torch_npu cannot be used: {error}"
        return None if is_available("npu") else "no NPU"

    def make_sender(self, name: str, device: torch.device) -> WeightSender:
        """See `CheckpointEngine.make_sender`."""
        return CollectiveSender(name, self.options, self.backend, device)

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:
        """See `CheckpointEngine.make_receiver`."""
        return CollectiveReceiver(name, self.options, self.backend, device)
