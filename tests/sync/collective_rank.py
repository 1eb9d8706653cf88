"""One of two trainer ranks, as torchrun starts them: says how the life of its `CollectivePublisher` ended.

Mode ``unwilling``: the replica refuses to connect. ``slow``: rank 1 lets a while pass before it reads each of its messages.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from shelf import SHAPE, Shelf

from weightlane.ckpt_engines import ConfigError, WeightlaneError
from weightlane.sync import CollectivePublisher, LocalShard, SyncConfig, TensorSpec, rendezvous


class Unwilling(Shelf):
    async def connect(self, *_: object) -> None:
        raise ConfigError("not today.", part=self.name)


class SlowInbox(rendezvous.Inbox):
    def get(self, *args: Any, **settings: Any) -> Any:
        time.sleep(0.5)
        return super().get(*args, **settings)


def main() -> None:
    rank, port, mode = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    rows = (SHAPE[0] + 1) // 2
    shard = LocalShard(TensorSpec("w", SHAPE, torch.float32), (rank * rows, 0), torch.ones(SHAPE)[rank * rows :][:rows])
    replica = Unwilling() if mode == "unwilling" else Shelf()
    if mode == "slow" and rank == 1:
        rendezvous.Inbox = SlowInbox  # type: ignore[misc]
    try:
        with CollectivePublisher([shard], [replica], backend="shm", config=SyncConfig()) as weights:
            weights.publish(1)
        print("done", flush=True)
    except WeightlaneError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    replica.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
