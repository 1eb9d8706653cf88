"""A Ray that does not come up is one line for the user, and the user's own signal where there was one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from tiny_run import Material
from waiting import HANG_S

from weightlane.ckpt_engines import ConfigError, WorkerDiedError
from weightlane.cli.commands.train import run_training
from weightlane.cli.run import processes
from weightlane.cli.run.ray_cluster import patient_ray
from weightlane.trainer.algorithms.roles import POLICY


@pytest.mark.parametrize(
    ("sent", "raised", "said"),
    [
        (None, WorkerDiedError, "Ray did not start on this machine: the current node timed out. See gcs_server"),
        (signal.SIGINT, KeyboardInterrupt, "^$"),
        (signal.SIGTERM, asyncio.CancelledError, "^$"),
    ],
)
def test_a_raylet_that_is_too_slow_is_told_in_words_and_a_signal_meanwhile_is_what_ended_the_run(
    sent: signal.Signals | None,
    raised: type[BaseException],
    said: str,
    material: Material,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    def time_out(**_: object) -> None:
        if sent is not None:
            os.kill(os.getpid(), sent)
        raise Exception("the current node timed out.")  # noqa: TRY002 - as Ray does

    monkeypatch.setattr(ray, "init", time_out)
    monkeypatch.setattr("getpass.getuser", lambda: {}["uid not found"])
    path = material.write_config(tmp_path, tmp_path / "run")
    with pytest.raises(raised, match=said):
        asyncio.run(run_training(path, [], resume=False, live=False))


def test_a_node_that_takes_its_time_is_waited_for_and_one_that_never_comes_up_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private import services

    outcomes = iter([RuntimeError("not yet"), RuntimeError("not yet"), "the node"])

    def look(*_: object) -> object:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(services, "get_node", look)
    # A process of the caller's says nothing of Ray's.
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE), patient_ray(HANG_S):
        assert services.get_node("address", "id") == "the node"
    assert services.get_node is look
    outcomes = repeat(RuntimeError("not yet"))
    with patient_ray(0.001), pytest.raises(RuntimeError, match="not yet"):
        services.get_node("address", "id")


def test_trainers_that_do_not_start_end_the_start_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse() -> None:
        raise ConfigError("no trainer.")

    async def take_for_ever(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async def start() -> None:
        config = MagicMock(rank_groups={}, trainer=MagicMock(colocate=False))
        policy: Any = SimpleNamespace(name=POLICY, model_dir="")
        async with AsyncExitStack() as stack:
            await processes.start_processes(config, [policy], MagicMock(), MagicMock(), MagicMock(), stack)

    monkeypatch.setattr(processes, "ray_dispatch", lambda *_: MagicMock(start=refuse, close=AsyncMock()))
    monkeypatch.setattr(processes, "start_replicas", take_for_ever)
    with pytest.raises(ConfigError, match="no trainer"):
        asyncio.run(asyncio.wait_for(start(), HANG_S))


KILLS = """
import json, os, re, signal, sys, threading, time
from pathlib import Path
from weightlane.cli.config.run_config import RaySection
from weightlane.cli.run.ray_cluster import RayCluster, _is_raylet, _started_here

killed = set()

def kill_the_first():
    while not killed:
        for process, command in _started_here().items():
            if _is_raylet(command):
                killed.add(process)
                os.kill(process, signal.SIGKILL)
        time.sleep(0.001)

threading.Thread(target=kill_the_first, daemon=True).start()
with RayCluster(RaySection(start_timeout_s=600), 1, Path(sys.argv[1]), {}) as cluster:
    import ray
    sessions = set(re.findall("session_[0-9_-]+", "".join(_started_here().values())))
    print(json.dumps({"killed": len(killed), "nodes": len(ray.nodes()), "sessions": len(sessions)}))
    cluster.succeeded()
"""


@pytest.mark.ray
@pytest.mark.exhaustive
def test_a_raylet_that_dies_while_it_starts_is_started_again_and_not_waited_for(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path / "logs")],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert json.loads(done.stdout) == {"killed": 1, "nodes": 1, "sessions": 1}, done.stdout + done.stderr
