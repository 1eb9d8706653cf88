"""Agents that are programs: what they are given, and how they end."""

from __future__ import annotations

import asyncio
import fcntl
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import cast

import psutil
import pytest
from agent_world import Saying, agent_of, ids, played, player_of
from loop_world import TASKS, World
from waiting import HANG_S, wait_until

from weightlane.trainer.loop.environments.agents.environment import AgentOptions
from weightlane.trainer.loop.protocols import Rollout

PROGRAM = """
import json, os, sys, threading, urllib.request

task = json.loads(sys.stdin.readline())
print("a program may print what it wants", len(sys.argv))

def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "x", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

messages = [{"role": "user", "content": sys.argv[1]}]
reply = ask(messages)
reply = ask([*messages, reply, {"role": "user", "content": task["prompt"]}])
result = {"reward": len(reply["content"]), "words": len(sys.argv[1].split(" "))}
threading.Thread(target=lambda: print(json.dumps(result))).start()
"""


def test_a_program_plays_by_its_environment_and_arguments_alone(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["python", "program.py", "Say {prompt} {of} {"]
    found, rollout = played(tmp_path, command, options={"reward": "agent"})
    assert (found.error, found.reward, found.metrics) == (None, len("reply 1"), {"words": 4.0})
    assert rollout.said[0][0] == ids("0 tools<user>Say task-0 {of} {\0<assistant>")
    assert len(found.trajectory.sequences) == 1
    # The last line of a program that fails, because its episode is cut short, is no reward.
    counting = "print(7); [ask([{'role': 'user', 'content': 'x'}]) for _ in range(2)]"
    (tmp_path / "counting.py").write_text(PROGRAM.partition("messages = [")[0] + counting)
    found, _ = played(tmp_path, ["python", "counting.py"], options={"reward": "agent"}, max_turns=1)
    assert (found.error, found.reward, found.ended) == (None, 0.0, "turns")


def test_the_guides_program_over_openais_sdk_plays_forked_with_the_guides_options(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[4] / "docs/guides/agents.md").read_text()
    ((_, program), (_, settings)) = re.findall(r"^```(python|toml)\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    (tmp_path / "solver.py").write_text(program)
    options = tomllib.loads(settings)["environment"]["options"]
    assert options["preload"] == ["openai"]
    found, rollout = played(tmp_path, options["command"], options=options, judge=lambda text, task: len(text))
    assert (found.error, found.reward) == (None, len("reply 1"))
    assert rollout.said[1][0][-len("<user>Are you sure?.<assistant>") :] == ids("<user>Are you sure?\0<assistant>")
    assert len(found.trajectory.sequences) == 1
    cells = re.findall(r"^\| ([^|]*) \|", guide.partition("## What a call")[0], re.MULTILINE)
    documented = re.findall(r"`(\w+)`", " ".join(cells))
    assert set(documented) == set(AgentOptions.model_fields)


HANGING = """
import fcntl, os, subprocess, sys, time
here = sys.argv[1]
child = 'import fcntl, sys, time; f = open(sys.argv[1], "r+"); fcntl.flock(f, 2); f.write("held"); f.flush(); time.sleep(1e6)'
subprocess.run([sys.executable, "-c", child, here])
"""


def test_a_program_is_killed_at_the_limit_with_what_it_has_started(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(HANGING)
    held = tmp_path / "held"
    held.touch()

    async def main() -> None:
        environment = agent_of(tmp_path, {"command": ["python", "program.py", str(held)]})
        player = player_of(environment, turn_time_limit_s=HANG_S)
        playing = asyncio.create_task(player.play(cast("Rollout", Saying(World(), "r")), TASKS[0], greedy=False))
        await asyncio.to_thread(wait_until, lambda: bool(held.read_text()), "the start of the agent")
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        wait_until(lambda: is_free(held), "the end of what the agent had started")
        await environment.close()

    asyncio.run(main())


RUN = """
import asyncio, sys
from pathlib import Path
from weightlane.trainer.loop.environments.agents.programs import Programs

asyncio.run(Programs([]).run([sys.executable, "program.py", sys.argv[1]], {}, "", Path(sys.argv[2])))
"""


@pytest.mark.parametrize("killed", ["run", pytest.param("fork server", marks=pytest.mark.exhaustive)])
def test_a_program_ends_with_the_run_or_the_server_that_is_killed(killed: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(HANGING)
    held = tmp_path / "held"
    held.touch()
    command = [sys.executable, "-c", RUN, str(held), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: bool(held.read_text()), "the start of the agent")
            if killed == "fork server":
                (server,) = psutil.Process(process.pid).children()
                server.kill()
                _, errors = process.communicate(timeout=HANG_S)
                assert "WorkerDiedError: agent: the process that supervises the program was killed" in errors
        finally:
            process.kill()
    wait_until(lambda: is_free(held), "the end of what the agent had started")


def is_free(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
