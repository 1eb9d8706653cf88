"""Prints, as JSON, on which nodes trainer ranks are, in a Ray cluster of two nodes with five and four CPUs."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import ray
from ray.cluster_utils import Cluster

from weightlane.trainer import TrainerConfig
from weightlane.trainer.dispatch import ray_ranks


class Actor:
    """A rank that knows where it is, and does not import torch."""

    def __init__(self, rank: int, world: int, group: str) -> None:
        self.closed = threading.Event()

    def call(self, method: str) -> str:
        return ray.get_runtime_context().get_node_id()

    def free_address(self, host: str | None) -> tuple[str, int]:
        return str(host), 1

    def alive(self) -> None:
        self.closed.wait()

    def close(self) -> None:
        self.closed.set()


async def nodes(**settings: Any) -> list[str]:
    ranks = ray_ranks.RayRanks(TrainerConfig(device="cpu", **settings), "127.0.0.1")
    try:
        await ranks.rendezvous()
        return await ranks.call("node")
    finally:
        await ranks.close()


async def main() -> None:
    found: dict[str, Any] = {}
    for name, settings in {
        "pairs": {"ranks": 6, "fsdp2": {"tensor_parallel": 3}},
        "wider than a node": {"ranks": 6, "fsdp2": {"tensor_parallel": 6}},
        "single": {"ranks": 8},
    }.items():
        found[name] = await nodes(**settings)
    try:
        await nodes(ranks=12, call_timeout_s=3.0)
    except Exception as error:  # noqa: BLE001 - told
        found["too many"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    ray_ranks.RankActor = Actor  # type: ignore[misc,assignment]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for cpus in (5, 4):
        cluster.add_node(num_cpus=cpus)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    asyncio.run(main())
    ray.shutdown()
    cluster.shutdown()
