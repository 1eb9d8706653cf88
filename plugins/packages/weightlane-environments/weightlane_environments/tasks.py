"""Writes task files of problems, games or resets, none of which is both in the training file and in the held-out one.

    python -m weightlane_environments.tasks reasoning-gym chain_sum --option max_terms=2 --train 2000 --heldout 200 --out tasks
    python -m weightlane_environments.tasks textarena GuessTheNumber-v0 --train 2000 --heldout 200 --out tasks
    python -m weightlane_environments.tasks openenv --train 2000 --heldout 200 --out tasks

Writes ``OUT/train.jsonl`` and ``OUT/heldout.jsonl``. Held-out tasks have the seeds from ``--seed`` on (of reasoning-gym: they are
the first problems of the dataset with this seed), and training tasks those that follow. Of equal prompts one is kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import WeightlaneError

from .library_process import LibraryOptions, LibraryProcess

Task = dict[str, Any]
_MOST_S = 3600.0
"""Most seconds in which reasoning-gym makes all problems."""


def write_tasks(tasks: Iterable[Task], *, heldout: int, out: Path) -> tuple[int, int]:
    """Write `tasks`, of which the first `heldout` are held out, without those whose prompt came before.

    Returns how many tasks were written for training, and held out.
    """
    seen: set[str] = set()
    parts: dict[str, list[Task]] = {"heldout": [], "train": []}
    for number, task in enumerate(tasks):
        if task["prompt"] not in seen:
            seen.add(task["prompt"])
            parts["heldout" if number < heldout else "train"].append(task)
    out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in part))
    return len(parts["train"]), len(parts["heldout"])


def problem_tasks(dataset: str, options: dict[str, Any], *, seed: int, size: int, template: str) -> list[Task]:
    """Return the tasks of the first `size` problems of reasoning-gym's `dataset`. A prompt is `template` with its ``{question}``.

    Raises `ConfigError` for a dataset or options that reasoning-gym does not have.
    """
    process = LibraryProcess(
        "problems", library="reasoning-gym", name="reasoning-gym", options=LibraryOptions(call_time_limit_s=_MOST_S)
    )
    given = {**options, "seed": seed, "size": size}
    specs = [{"dataset": dataset, "index": index, "options": given} for index in range(size)]
    return [
        {"prompt": template.replace("{question}", question), "answer": answer, "reasoning_gym": spec}
        for spec, (question, answer) in zip(specs, process.call_once("problems", specs=specs), strict=True)
    ]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", choices=["reasoning-gym", "textarena", "openenv"])
    parser.add_argument("name", nargs="?", help="dataset of reasoning-gym, or game of TextArena")
    parser.add_argument("--train", type=int, required=True, help="training tasks")
    parser.add_argument("--heldout", type=int, required=True, help="held-out tasks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="option of the dataset, in JSON"
    )
    parser.add_argument("--template", default="{question}", help="prompt of a problem, with {question} in it")
    given = parser.parse_args()
    if (given.name is None) != (given.environment == "openenv"):
        parser.error("reasoning-gym and textarena need a name, and openenv has none.")
    size = given.heldout + given.train
    seeds = range(given.seed, given.seed + size)
    tasks: Iterable[Task]
    if given.environment == "reasoning-gym":
        options = dict(map(_parsed, given.option))
        try:
            tasks = problem_tasks(given.name, options, seed=given.seed, size=size, template=given.template)
        except WeightlaneError as error:
            parser.exit(2, f"error: {error}\n")
    elif given.environment == "textarena":
        game = given.name
        tasks = ({"prompt": f"{game} {seed}", "answer": "", "game": game, "seed": seed} for seed in seeds)
    else:
        tasks = ({"prompt": f"seed {seed}", "answer": "", "reset": {"seed": seed}} for seed in seeds)
    train, heldout = write_tasks(tasks, heldout=given.heldout, out=given.out)
    print(f"{given.out}: {train} tasks for training, {heldout} held out, none in both.")  # noqa: T201 - a command's output


def _parsed(option: str) -> tuple[str, Any]:
    key, _, value = option.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


if __name__ == "__main__":
    main()
