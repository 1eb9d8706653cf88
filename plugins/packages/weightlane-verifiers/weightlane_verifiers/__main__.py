"""Writes the tasks of an environment of verifiers for ``data.train`` and ``data.heldout``.

python -m weightlane_verifiers tasks ENVIRONMENT --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from weightlane.ckpt_engines import ConfigError, WeightlaneError

from .configuration import PART, with_chat

_NAMES = {"idx", "id", "name"}
"""Keys of a task in which two with the same content differ."""


def table_of(environment: str) -> Mapping[str, Any]:
    """Return the table that describes ENVIRONMENT: the id of a taskset, or a TOML file with a table ``env``."""
    if not environment.endswith(".toml"):
        return {"taskset": {"id": environment}}
    try:
        table: Mapping[str, Any] = tomllib.loads(Path(environment).read_text())["env"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as cause:
        raise ConfigError(
            f"{environment} cannot be read: {type(cause).__name__}: {cause}.",
            part=PART,
            hint="Name a TOML file with a table [env], or the id of a taskset.",
        ) from cause
    return table


def write_tasks(table: Mapping[str, Any], out: Path, train: int, heldout: int) -> None:
    """Write the first `heldout` tasks of the taskset, and the next `train`; of several with the same content the first.

    Raises `ConfigError` if the environment cannot be configured, cannot load its tasks, or has too few.
    """
    config = with_chat(table)
    shown = config.model_dump(mode="json", exclude_none=True)
    lines: dict[str, str] = {}
    try:
        for task in vf.load_taskset(config.taskset).take(heldout + train):
            data = task.data.model_dump(mode="json", exclude_none=True)
            content = json.dumps({key: value for key, value in data.items() if key not in _NAMES}, sort_keys=True)
            # Agents do not read the prompt. It is for reports, and other tasks of an environment may have the same.
            prompt = f"[{config.env_id} {task.data.idx}] {task.data.prompt_text}"
            line = {"prompt": prompt, "answer": "", "environment": shown, "task": data}
            lines.setdefault(content, json.dumps(line) + "\n")
    except Exception as cause:  # it is the environment's own code
        raise ConfigError(
            f"{config.env_id} cannot load its tasks: {type(cause).__name__}: {cause}",
            part=PART,
            hint="It may need a network, data, or packages that its own documentation names.",
        ) from cause
    if len(lines) <= heldout:
        raise ConfigError(
            f"{config.env_id} has {len(lines)} tasks, of which --heldout {heldout} leave none to train on.", part=PART
        )
    out.mkdir(parents=True, exist_ok=True)
    every = list(lines.values())
    for name, part in (("heldout", every[:heldout]), ("train", every[heldout:])):
        (out / f"{name}.jsonl").write_text("".join(part))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m weightlane_verifiers", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    tasks = commands.add_parser("tasks", help="write an environment's tasks")
    tasks.add_argument("environment", help="id of a taskset, such as gsm8k-v1, or a TOML file with a table [env]")
    tasks.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and heldout.jsonl")
    tasks.add_argument("--train", type=int, default=4000, help="most tasks to train on (default: 4000)")
    tasks.add_argument("--heldout", type=int, default=256, help="held-out tasks (default: 256)")
    options = parser.parse_args(arguments)
    try:
        write_tasks(table_of(options.environment), options.out, options.train, options.heldout)
    except WeightlaneError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"wrote {options.out / 'heldout.jsonl'} and {options.out / 'train.jsonl'}")  # noqa: T201 - a command's output


if __name__ == "__main__":
    main()
