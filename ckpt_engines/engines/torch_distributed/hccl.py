"""The ``hccl`` engine: Ascend NPU memory over HCCS or RoCE, by torch.distributed and torch_npu."""

from __future__ import annotations

import importlib
import importlib.util

from ...contract.capabilities import Capabilities, Delivery
from ...runtime.devices import is_available
from .collective_halves import CollectiveEngine


class HcclEngine(CollectiveEngine):
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
