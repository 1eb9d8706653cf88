"""The ``nccl`` engine: CUDA memory over NVLink, InfiniBand or TCP, by torch.distributed."""

from __future__ import annotations

import os

import torch.distributed as dist
from pydantic import Field

from ...contract.capabilities import Capabilities, Delivery
from ...runtime.devices import is_available
from .collective_halves import CollectiveEngine
from .group_engine import TorchDistributedConfig


class NcclConfig(TorchDistributedConfig):
    """Options of ``nccl``."""

    interface: str = Field(
        "",
        description=(
            "Network interface whose IPv4 address each process uses in place of `host` for traffic beside NCCL: control"
            " connections and the store in which members meet. Of several, such as 'eth0,eth1', a participant takes the one"
            " that the number at the end of its name selects. The data path is NCCL's: it takes the network card nearest to"
            " each GPU, so senders on several GPUs use several cards. To choose others, start each process with its own"
            " NCCL_IB_HCA (or NCCL_SOCKET_IFNAME, also for NCCL's bootstrap): NCCL reads these once per process, for the"
            " training's groups too, so weightlane leaves them alone."
        ),
    )
    net_name: str = Field(
        "",
        description=(
            "Network module of these communicators alone, such as 'IB', 'Socket' or a plugin's name (ncclConfig_t.netName);"
            " empty: NCCL's choice."
        ),
    )
    max_ctas: int = Field(
        0,
        ge=0,
        description=(
            "Most thread blocks that a transfer occupies on the GPU (ncclConfig_t.maxCTAs): fewer leave more of it to"
            " training and generation, and take less memory per communicator; 0: NCCL's choice."
        ),
    )
    traffic_class: int = Field(
        -1,
        ge=-1,
        description=(
            "Network traffic class of these communicators (ncclConfig_t.trafficClass, NCCL 2.26 and later), so that switches"
            " can tell weights from gradients; -1: NCCL's choice."
        ),
    )

    def communicator_settings(self) -> dict[str, int | str]:
        """See `TorchDistributedConfig.communicator_settings`."""
        chosen: dict[str, int | str] = {}
        if self.net_name:
            chosen["net_name"] = self.net_name
        if self.max_ctas:
            chosen["max_ctas"] = self.max_ctas
        if self.traffic_class >= 0:
            chosen["traffic_class"] = self.traffic_class
        return chosen


_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable with the number of hardware queues that a process has for a GPU."""


class NcclEngine(CollectiveEngine):
    """CUDA memory over NVLink, InfiniBand or TCP."""

    config_type = NcclConfig
    backend = "nccl"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}),
        collective=True,
        channels=False,
    )

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        if not is_available("cuda"):
            return "no CUDA device"
        if os.environ.get(_QUEUES) == "1":
            # Seen on an H200, with two ranks that use two communicators in different orders: on one rank, the transfer waits in
            # the queue behind a collective, which waits for the other rank; there, the collective waits behind the transfer.
            return (
                f"{_QUEUES} is 1, so transfers and the training's own collectives would wait for each other for ever in the"
                " one queue of a GPU: unset it, set it to 8 or more, or use cuda_ipc or shm"
            )
        return None if dist.is_nccl_available() else "this torch was built without NCCL"
