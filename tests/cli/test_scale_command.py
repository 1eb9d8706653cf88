"""`weightlane scale` changes a run that trains, says what happens, and refuses in one line what cannot be."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from command_line import assert_refused, run
from loop_world import LiveRollout, World, first_is_better, loop_of
from waiting import HANG_S, NEVER_S

from weightlane.ckpt_engines import (
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    PeerLostError,
    WeightlaneError,
    WorkerDiedError,
)
from weightlane.ckpt_engines.runtime.threads import DaemonThreads
from weightlane.cli.commands import scale
from weightlane.cli.commands.scale import scale_run
from weightlane.cli.fleet import room as rooms
from weightlane.cli.fleet.fleet_control import FleetControl
from weightlane.cli.fleet.room import RoomFollower
from weightlane.cli.fleet.scale_files import REQUEST
from weightlane.cli.run.ray_cluster import ClusterRoom
from weightlane.rollout.config import RolloutConfig
from weightlane.trainer.loop.fleet import Fleet, FleetState
from weightlane.trainer.loop.protocols import Rollout
from weightlane.trainer.runner.run_dir import RunDir, write_whole


async def refuse_nine(wanted: int) -> None:
    if wanted == 9:
        raise ConfigError("9 replicas need 9 GPUs, but there are 8.", part="resources")


def while_it_trains(path: Path, act: Callable[[World, list[str]], Awaitable[None]]) -> list[str]:
    """Run `act` beside a loop that trains in the directory `path`. Returns what the run has said."""
    world, said = World(), []

    async def start(name: str) -> Rollout:
        if name == "rollout-3":
            raise ConfigError("no room.", part=name)
        return cast("Rollout", LiveRollout(world, name))

    async def main() -> None:
        loop = loop_of(world, first_is_better, start_replica=start, steps=1_000_000, save_every=0, heldout={})
        async with FleetControl(path, loop.fleet, refuse_nine, said.append).following():
            running = asyncio.create_task(loop.run())
            try:
                await asyncio.wait_for(act(world, said), HANG_S)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    with RunDir(path, resume=False).owned():
        asyncio.run(main())
    return said


def test_a_run_gets_more_replicas_and_fewer_and_each_change_is_told(tmp_path: Path) -> None:
    told: list[str] = []

    async def act(world: World, said: list[str]) -> None:
        await asyncio.to_thread(scale_run, tmp_path, 3, HANG_S, told.append)
        assert [rollout.name for rollout in world.fleet.serving()] == ["rollout-0", "rollout-1", "rollout-2"]
        assert told[-1] == "3 replicas serve: rollout-0, rollout-1, rollout-2"
        assert {"rollout-1 serves", "rollout-2 serves"} <= set(told)
        told.clear()
        await asyncio.to_thread(scale_run, tmp_path, 1, HANG_S, told.append)
        assert [rollout.name for rollout in world.fleet.living] == ["rollout-0"]
        assert told[-1] == "1 replicas serve: rollout-0"
        await asyncio.to_thread(scale_run, tmp_path, 1, HANG_S, told.append)
        with pytest.raises(ConfigError, match="the run refuses: resources: 9 replicas need 9 GPUs"):
            await asyncio.to_thread(scale_run, tmp_path, 9, HANG_S, told.append)
        with pytest.raises(WorkerDiedError, match="rollout-3 could not start: rollout-3: no room"):
            await asyncio.to_thread(scale_run, tmp_path, 2, HANG_S, told.append)
        await asyncio.to_thread(scale_run, tmp_path, 2, HANG_S, told.append, wait=False)
        assert told[-1] == "1 replicas serve, and the run changes that to 2"

    said = while_it_trains(tmp_path, act)
    assert said[0] == "asked for 3 rollout replica(s) by weightlane scale"
    assert not (tmp_path / "state/fleet.json").exists()
    assert_refused(f"no run trains in {tmp_path}: it has ended", "scale", str(tmp_path), "--replicas", "2")


def test_a_run_that_does_not_train_is_refused_with_the_reason(tmp_path: Path) -> None:
    command = ("scale", str(tmp_path), "--replicas")
    assert_refused("is not the directory of a run", *command, "2")
    with RunDir(tmp_path, resume=False).owned():
        assert_refused("does not train: it still starts", *command, "2")
        (tmp_path / "state/fleet.json").write_text("damaged")
        assert_refused("does not train: it still starts", *command, "2")
    write_record(tmp_path)
    assert_refused("is gone: its process 7 on here was killed", *command, "2")
    assert run(*command, "0").exit_code == 2


def write_record(path: Path, **facts: Any) -> None:
    record = {"host": "here", "pid": 7, "wanted": 1, "serving": ["rollout-0"], **facts}
    (path / "state/fleet.json").write_text(json.dumps(record))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale.socket, "gethostname", lambda: "here")


@pytest.mark.parametrize(
    ("answer", "silent_s", "timeout_s", "error", "said"),
    [
        ({"host": "there"}, 0.1, NEVER_S, PeerLostError, "has not answered for"),
        ({"request": "another"}, NEVER_S, NEVER_S, ConfigError, "another command has asked"),
        (None, NEVER_S, NEVER_S, ClosedError, "has ended meanwhile"),
        ({}, NEVER_S, 0.1, DeadlineExceededError, "2 replicas to serve, of which 1 do"),
        ({"missing": ["rollout-1"], "mine": True}, NEVER_S, NEVER_S, WorkerDiedError, "rollout-1 died meanwhile"),
    ],
)
def test_a_run_that_does_not_do_it_is_told_apart(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Mapping[str, Any] | None,
    silent_s: float,
    timeout_s: float,
    error: type[WeightlaneError],
    said: str,
) -> None:
    """The answer of the run is there as soon as the request is written."""
    monkeypatch.setattr(scale, "_SILENT_S", silent_s)
    on_another_machine = answer is not None and "host" in answer

    def answering(path: Path, text: str) -> None:
        write_whole(path, text)
        if answer is None:
            (tmp_path / "state/fleet.json").unlink()
        else:
            key = json.loads(text)["key"] if answer.get("mine") else ""
            write_record(tmp_path, **{"request": key, **answer})

    monkeypatch.setattr(scale, "write_whole", answering)
    with RunDir(tmp_path, resume=False).owned() if not on_another_machine else nullcontext():
        (tmp_path / "state").mkdir(exist_ok=True)
        write_record(tmp_path, host="there" if on_another_machine else "here")
        with pytest.raises(error, match=said):
            scale_run(tmp_path, 2, timeout_s, print)
    assert (tmp_path / REQUEST).is_file()


ONE = RolloutConfig(tensor_parallel=2, cpus_per_rank=1.0, gpus_per_rank=0.5, replicas=1, max_replicas=6, autoscale=True)


class CountingFleet:
    """What a `RoomFollower` sees of a fleet: its state, and that it is scaled."""

    def __init__(self) -> None:
        self.replicas, self.starting, self.failed = 1, 0, ""

    def state(self) -> FleetState:
        names = [f"rollout-{number}" for number in range(self.replicas + self.starting)]
        wanted = self.replicas + self.starting
        return FleetState(wanted, names[: self.replicas], [], names[self.replicas :], [], [], self.failed)

    def scale(self, wanted: int) -> None:
        self.starting, self.failed = wanted - self.replicas, ""


def room(*machines: tuple[float, float], free: tuple[float, float]) -> ClusterRoom:
    each = [{"CPU": cpus, "GPU": gpus} for cpus, gpus in machines]
    return ClusterRoom(dict(zip("abc", each, strict=False)), {"CPU": free[0], "GPU": free[1]})


def test_a_fleet_that_follows_the_machines_grows_with_them_and_pauses_after_a_start_that_failed() -> None:
    fleet = CountingFleet()
    follower = RoomFollower(cast("Fleet", fleet), ONE, cast("Any", None))
    follower.scale(room((8, 2), free=(5, 1)), now=0.0)
    assert fleet.starting == 1, "GPUs for one more"
    follower.scale(room((8, 2), free=(5, 1)), now=5.0)
    assert fleet.starting == 1, "which has not reserved them yet"
    fleet.starting, fleet.failed = 0, "rollout-1 could not start: no room."
    for now, starting in ((10.0, 0), (60.0, 0), (71.0, 1)):
        follower.scale(room((8, 2), free=(5, 1)), now=now)
        assert fleet.starting == starting, now
    fleet.starting, fleet.failed = 0, "rollout-2 could not start: no room."
    follower.scale(room((8, 2), free=(5, 1)), now=80.0)
    assert fleet.starting == 0
    follower.scale(room((8, 2), (8, 8), free=(13, 9)), now=81.0)
    assert fleet.starting == 5, "a new machine is tried at once, and there are six at most"
    fleet.replicas, fleet.starting = 1, 0
    follower.scale(room((1, 8), (1, 8), free=(2, 16)), now=9999.0)
    assert fleet.starting == 0, "no machine is large enough"


def test_a_ray_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "_ANSWER_S", 0.05)
    answers, threads = threading.Event(), DaemonThreads(1, "ray")
    with pytest.raises(DeadlineExceededError, match="the Ray cluster did not say within 0 s"):
        asyncio.run(asyncio.wait_for(rooms.ask_ray(threads, answers.wait), HANG_S))
    answers.set()
    threads.shutdown()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_fleet_follows_the_machines_of_a_real_cluster(children: Any) -> None:
    program = str(Path(__file__).with_name("run") / "followed_machines.py")
    code, printed, errors = children.run([program], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert code == 0, errors
    told = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))  # Ray prints, too
    first, second, third = told["found"]
    assert (first["serving"], second["wanted"]) == (["rollout-0", "rollout-1"], 4)
    assert (third["wanted"], third["serving"], third["missing"]) == (2, ["rollout-0", "rollout-1"], [])
    assert told["counted"] == ["rollout-0", "rollout-1"], "the dead do not count"
    assert told["said"] == []
