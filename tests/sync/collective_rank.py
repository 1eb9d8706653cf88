"""One of two trainer ranks, as torchrun starts them, whose publishers cannot connect: says how that reads here."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from weightlane.ckpt_engines import ConfigError, WeightlaneError
from weightlane.sync import CollectivePublisher, LocalShard, SyncConfig, TensorSpec


class Unwilling:
    name = "rollout-0"

    def subscriber_names(self) -> list[str]:
        return ["rollout-0/0"]

    async def connect(self, *_: object) -> None:
        raise ConfigError("not today.", part=self.name)

    async def commit(self, version: int) -> None:
        raise AssertionError

    async def rollback(self, version: int) -> None:
        raise AssertionError

    async def quarantine(self, error: WeightlaneError) -> None:
        raise AssertionError


def main() -> None:
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    spec = TensorSpec("w", (4, 2), torch.float32)
    shards = [LocalShard(spec, (2 * rank, 0), torch.zeros(2, 2))]
    try:
        CollectivePublisher(shards, [Unwilling()] if rank == 0 else [], backend="shm", config=SyncConfig())
    except WeightlaneError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
