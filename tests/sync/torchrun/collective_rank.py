"""One of two trainer ranks, each in a process of its own, with a `CollectivePublisher`."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from direct_hop import rows
from patience import PATIENT
from shelf import SPEC, Shelf
from waiting import HANG_S

from weightlane.ckpt_engines import ConfigError
from weightlane.sync import CollectivePublisher, Coordinator, LocalShard, SyncConfig
from weightlane.sync.control import rendezvous
from weightlane.sync.control.messages import Go


class Unwilling(Shelf):
    """It refuses to connect."""

    async def connect(self, *_: object) -> None:
        raise ConfigError("not today.", part=self.name)


def read_later_than_rank_0_closes(rank: int, waited_for: Any) -> None:
    """Rank 1 does not read how the version ended before rank 0 waits for that, or is gone."""
    if rank == 0:
        wait_until_heard = Coordinator.wait_until_heard

        def wait_now(coordinator: Coordinator, _: float) -> None:
            waited_for.set()
            wait_until_heard(coordinator, HANG_S)

        Coordinator.wait_until_heard = wait_now  # type: ignore[method-assign]
        return

    class SlowInbox(rendezvous.Inbox):
        sends = False

        def get(self, *args: Any, **settings: Any) -> Any:
            if self.sends:
                waited_for.wait(HANG_S)
            message = super().get(*args, **settings)
            self.sends = self.sends or isinstance(message, Go)
            return message

    rendezvous.Inbox = SlowInbox  # type: ignore[misc]


class Rank:
    """One of two ranks. In mode ``unwilling`` its replica refuses to connect; ``slow``: see `read_later_than_rank_0_closes`."""

    def __init__(self, rank: int, port: int, mode: str, waited_for: Any) -> None:
        self._rank = rank
        self._replica = Unwilling() if mode == "unwilling" else Shelf()
        if mode == "slow":
            read_later_than_rank_0_closes(rank, waited_for)
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
