"""The CUDA IPC engine: buckets stay in the sender's device memory, and receivers on the same host copy them out of it.

It is for trainer and rollout on one GPU, which NCCL refuses, and for GPUs that reach each other over NVLink or PCIe.
"""

from __future__ import annotations

import sys

import torch

from ...contract.capabilities import Capabilities, Delivery
from ...runtime.devices import is_available
from .cuda_segments import CudaSegmentKind
from .segment_engine import SegmentEngine


class CudaIpcEngine(SegmentEngine):
    """CUDA memory shared between processes of one host. For processes that share a GPU, or whose GPUs reach each other."""

    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}),
        same_host_only=True,
    )
    label = "cuda_ipc"
    segment_kind = CudaSegmentKind

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        if not sys.platform.startswith("linux"):
            return "CUDA passes memory between processes on Linux only"
        if torch.version.hip:
            return "ROCm is not supported"
        return None if is_available("cuda") else "no CUDA device"
