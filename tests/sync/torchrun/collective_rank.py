"""One of two trainer ranks, each in a process of its own, with a `CollectivePublisher`."""

from __future__ import annotations

import os
from contextlib import closing

import torch
import torch.distributed as dist
from patience import PATIENT
from shelf import SPEC, Shelf
from slices import rows

from weightlane.ckpt_engines import ConfigError
from weightlane.sync import CollectivePublisher, LocalShard, RankExchange, SyncConfig


class Unwilling(Shelf):
    """It refuses to connect."""

    async def connect(self, *_: object) -> None:
        raise ConfigError("not today.", part=self.name)


class Rank:
    """One of two ranks, each with a replica."""

    def __init__(self, rank: int, port: int) -> None:
        self._rank = rank
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def publish(self, unwilling: bool) -> None:
        """Publish one version to a replica, which refuses to connect if `unwilling`."""
        replica = Unwilling() if unwilling else Shelf()
        (box,) = rows(SPEC, self._rank, 2)
        shard = LocalShard(SPEC, box.starts, torch.ones(box.shape))
        config = SyncConfig(**PATIENT)
        with closing(replica), CollectivePublisher([shard], [replica], backend="shm", config=config) as weights:
            weights.publish(1)

    def publish_alone(self) -> bool:
        """Publish one version of the full tensor on rank 0, without the other one. Returns whether the replica shows it."""
        with closing(Shelf()) as replica:
            shard = LocalShard.whole(SPEC, torch.full(SPEC.shape, 3.0))
            config, ranks = SyncConfig(**PATIENT), RankExchange(shard.data.device, alone=True)
            with CollectivePublisher([shard], [replica], backend="shm", config=config, ranks=ranks) as weights:
                weights.publish(1)
            return replica.shows(3.0)

    def close(self) -> None:
        dist.destroy_process_group()
