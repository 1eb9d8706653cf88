"""One of two trainer ranks, each in a process of its own, with a `CollectivePublisher`."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from direct_hop import rows
from patience import PATIENT
from shelf import SPEC, Shelf

from weightlane.ckpt_engines import ConfigError
from weightlane.sync import CollectivePublisher, LocalShard, SyncConfig


class Unwilling(Shelf):
    """It refuses to connect."""

    async def connect(self, *_: object) -> None:
        raise ConfigError("not today.", part=self.name)


class Rank:
    """One of two ranks, with a replica that refuses to connect if `unwilling`."""

    def __init__(self, rank: int, port: int, unwilling: bool) -> None:
        self._rank = rank
        self._replica = Unwilling() if unwilling else Shelf()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def publish(self) -> None:
        """One version, from the first word to the last."""
        (box,) = rows(SPEC, self._rank, 2)
        shard = LocalShard(SPEC, box.starts, torch.ones(box.shape))
        config = SyncConfig(**PATIENT)
        with CollectivePublisher([shard], [self._replica], backend="shm", config=config) as weights:
            weights.publish(1)

    def close(self) -> None:
        self._replica.close()
        dist.destroy_process_group()
