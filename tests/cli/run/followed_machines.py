"""Prints, as JSON, the replicas of a loop that follows the machines of a Ray cluster, while two of them come and one goes."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn, cast

import ray
from loop_world import LiveRollout, World, first_is_better, loop_of
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError

from weightlane.ckpt_engines.runtime.threads import DaemonThreads
from weightlane.cli.fleet import room
from weightlane.cli.run.ray_cluster import ClusterRoom, RayCluster
from weightlane.rollout.config import RolloutConfig
from weightlane.trainer.loop.protocols import Rollout


@ray.remote(num_cpus=1)
class Process:
    """The process of a replica."""

    async def lives(self) -> None:
        """Answer at once."""

    async def watched(self) -> None:
        """Answer never."""
        await asyncio.Event().wait()


class PlacedRollout(LiveRollout):
    """A replica that dies with a process that Ray has placed."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.process = Process.remote()  # type: ignore[attr-defined]

    async def watch(self) -> NoReturn:
        try:
            await self.process.watched.remote()
        except RayActorError:
            self.gone.set()
        raise self.death

    async def close(self) -> None:
        await super().close()
        ray.kill(self.process)


async def main(cluster: Any) -> None:
    world = World(step_s=0.05)
    del world.states_["rollout-0"], world.replicas["rollout-0"]
    world.add(PlacedRollout(world, "rollout-0"))

    async def start(name: str) -> Rollout:
        rollout = PlacedRollout(world, name)
        await rollout.process.lives.remote()
        return cast("Rollout", rollout)

    rollouts = RolloutConfig(autoscale=True, max_replicas=4)
    settings: dict[str, Any] = {"follows_room": True, "max_staleness": 2, "save_every": 0, "heldout": {}}
    loop = loop_of(world, first_is_better, start_replica=start, steps=1_000_000, **settings)
    running = asyncio.create_task(loop.run())
    found, said = [], list[str]()

    async def until(serving: int) -> None:
        while len(world.fleet.serving()) != serving or world.fleet.state().starting:
            assert not running.done(), running
            await asyncio.sleep(0.05)
        found.append(world.fleet.state().to_plain())

    threads = DaemonThreads(1, "ray")

    async def look() -> ClusterRoom:
        return await room.ask_ray(threads, RayCluster.room)

    async with room.RoomFollower(world.fleet, rollouts, look).following(said.append):
        cluster.add_node(num_cpus=1)  # in this thread, since Ray sets handlers of signals
        await until(2)
        large = cluster.add_node(num_cpus=4)
        await until(4)
        cluster.remove_node(large, allow_graceful=False)
        await until(2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    print(json.dumps({"found": found, "said": said, "counted": sorted(world.states_), "steps": world.step}))


if __name__ == "__main__":
    room._POLL_S = 0.2
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    asyncio.run(asyncio.wait_for(main(cluster), 500))
    ray.shutdown()
    cluster.shutdown()
