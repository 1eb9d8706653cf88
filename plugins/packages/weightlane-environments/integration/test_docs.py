"""The page about these environments: its configurations are accepted, and its commands write what they say."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

from episodes import MOST_S, environment

PAGE = (Path(__file__).parents[4] / "docs/guides/environments-from-packages.md").read_text()


def test_the_configurations_of_the_page_make_environments() -> None:
    blocks = [tomllib.loads(block) for block in re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
    names = [block["environment"]["name"] for block in blocks]
    assert names == ["reasoning-gym", "textarena", "openenv"]
    for block in blocks:
        environment(block["environment"]["name"], **block["environment"]["options"])


def test_the_commands_of_the_page_write_task_files(tmp_path: Path) -> None:
    commands = re.findall(r"^    (python -m weightlane_environments.tasks .*)$", PAGE, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        _, *arguments = shlex.split(command)
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=MOST_S
        )
        assert re.fullmatch(r"tasks: \d+ tasks for training, \d+ held out, none in both.\n", done.stdout)
        assert (tmp_path / "tasks/train.jsonl").stat().st_size > 0
