"""One trainer rank as a `json_program`: ``python trainer_process.py '{"json": "arguments"}'``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from json_program import serve
from waiting import HANG_S

from weightlane.sync import CheckpointEngineConfig, Placement, SyncConfig
from weightlane.sync.config import CodecPolicy, Quantise
from weightlane.trainer import AlgorithmConfig, Objective, TrainerConfig
from weightlane.trainer.dispatch.rank_worker import RankWorker
from weightlane.trainer.dispatch.role_spec import RoleSpec

ROLE = "policy"


class Process:
    """A `RankWorker` with one role, called with plain data; one process may serve one after another."""

    def __init__(self, rank: int, world: int, port: int) -> None:
        self._place = (rank, world, port)
        self._ranks: list[RankWorker] = []

    @property
    def _rank(self) -> RankWorker:
        return self._ranks[-1]

    def setup(self, model: str, trainer: dict[str, Any] | None = None) -> int:
        """A new trainer rank. The first one owns the ranks' process group, which the later ones share."""
        rank, world, port = self._place
        config = TrainerConfig(ranks=world, learning_rate=1e-2, device="cpu", **(trainer or {}))
        fresh = RankWorker(rank, world)
        spec = RoleSpec(ROLE, config, Path(model), {"objective": Objective(AlgorithmConfig())})
        step = fresh.setup(spec, ("127.0.0.1", port))
        self._ranks.append(fresh)
        return step

    def placement(self, wire_dtype: str) -> Any:
        return self._rank.placement(ROLE, wire_dtype).to_plain()

    def connect(
        self,
        rendezvous: dict[str, Any],
        backend: str,
        options: dict[str, Any],
        wire: str,
        placements: Any,
        quantise: Quantise,
        codec: CodecPolicy,
    ) -> None:
        transport = CheckpointEngineConfig(backend=backend, options=options)
        sync = SyncConfig(bucket_mib=0.05, deadline_s=HANG_S, quantise=quantise, codec=codec)
        self._rank.connect(ROLE, rendezvous, transport, sync, wire, list(map(Placement.from_plain, placements)))

    def publish(self, version: int) -> float:
        return self._rank.publish(ROLE, version)

    def nudge(self, version: int, every: int) -> None:
        """Change one element in `every` of each tensor, the same ones on whatever rank they are: see `nudge`."""
        hosted = self._rank._roles[ROLE]
        if hosted.publisher is not None:
            hosted.publisher.fence()
        for shard in hosted.engine.local_shards(torch.float32):
            numbers = torch.arange(shard.spec.numel).view(shard.spec.shape)[shard.box.index]
            shard.data.add_(nudge(numbers, version, every))

    def close(self) -> None:
        for rank in reversed(self._ranks):
            rank.close()


def nudge(numbers: torch.Tensor, version: int, every: int) -> torch.Tensor:
    """Compute the increment that `version` adds to the elements with these `numbers` in a tensor."""
    return (numbers % every == version % every).float() * (0.25 + numbers % 7) / 8


if __name__ == "__main__":
    serve(Process(**json.loads(sys.argv[1])))
