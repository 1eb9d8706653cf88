"""A run of `weightlane train` that learns, undisturbed and with replicas that are killed, added and removed at random.

    python -m benchmarks.training.kills --json kills.json

Both runs of a seed train examples/arithmetic with the same settings, and begin with three replicas of the engine `transformers`.
In the disturbed one, a third each of the events are SIGKILL of a random replica process, `weightlane scale` to one more replica,
and to one fewer. They are spread over the steps, in an order that the seed decides. A replica may be killed while it serves,
starts, or waits for its first version, as long as another one serves. A run that reaches the next event before the one before has
changed the fleet waits in its reward function, with groups in flight: its wall time is mostly that of starting replicas.

A run is verified if each prompt was trained once, by a full group, and in the same step as in the undisturbed run of its seed; if
the run tells of each death, join and departure that this program caused, and of no other; and if no process, shared memory or
temporary file is left. Accuracy is that of the exported model on 500 held-out tasks, by plain transformers.
"""

from __future__ import annotations

import json
import random
import runpy
import shutil
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from benchmarks.command import Report, finish, options_of, say, table
from benchmarks.training.watched_run import WEIGHTLANE, WatchedRun
from weightlane.cli.fleet.scale_files import RECORD, FleetRecord, read_file

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/arithmetic"
MODES = ("undisturbed", "disturbed")
KILL, MORE, FEWER = KINDS = ("kill", "more", "fewer")
REPLICAS, FEWEST, MOST = 3, 2, 5
"""Replicas to begin with, and least and most of those that serve after `FEWER` or `MORE`."""
GROUP_SIZE, PROMPTS_PER_STEP = 8, 16
APART = 0.05
"""Most difference of the modes' mean accuracies at the end."""
_SCALE_S = 900.0
"""Most seconds of ``weightlane scale``, which gives up sooner."""
REWARD = """
import time
from pathlib import Path

HOLD = Path(__file__).with_name("hold")

def exact_match(completion, task):
    while HOLD.exists():
        time.sleep(0.1)
    return float(completion == task["answer"])
"""


def start(folder: Path, name: str, seed: int, steps: int) -> WatchedRun:
    """Begin a run with the material in `folder`."""
    loop = {"steps": steps, "samples_per_step": GROUP_SIZE * PROMPTS_PER_STEP}
    fleet = {"replicas": REPLICAS, "max_replicas": MOST, "max_replacements": 1000, "drain_timeout_s": 5}
    settings: dict[str, dict[str, object]] = {
        "run": {"seed": seed},
        "model": {"path": folder / "task/model"},
        "data": {"train": folder / "train.jsonl", "heldout": folder / "task/heldout.jsonl"},
        "reward": {"time_limit_s": 3000},
        "loop": {**loop, "evaluate_tasks": 0, "blocking_syncs": 0, "save_every": 0},
        "algorithm": {"group_size": GROUP_SIZE, "prompts_per_step": PROMPTS_PER_STEP},
        "trainer": {"ranks": 1, "cpus_per_rank": 0.5},
        "rollout": {**fleet, "engine": "transformers", "cpus_per_rank": 0.25, "start_timeout_s": 900},
        "sync": {"quorum": 0.1},
        "ray": {"start_timeout_s": 600},
    }
    (folder / "hold").unlink(missing_ok=True)
    shutil.rmtree(folder / name, ignore_errors=True)
    return WatchedRun(folder / "arithmetic.toml", folder / name, settings=settings)


def disturb(run: WatchedRun, hold: Path, seed: int, steps: int, events: int) -> Counter[str]:
    """Kill, add and remove replicas in the first nine tenths of the steps. Returns how often each was done.

    While the file `hold` exists, the run gets no rewards.
    """
    chance, done = random.Random(seed), Counter[str]()
    drawn = [KINDS[number % len(KINDS)] for number in range(events)]
    chance.shuffle(drawn)

    def fleet() -> FleetRecord:
        return read_file(FleetRecord, run.directory / RECORD) or FleetRecord(host="", pid=0, starting=("rollout-0",))

    def may_kill() -> bool:
        now = fleet()  # what leaves ends by itself, and what has just died is not told yet
        there = [*now.serving, *now.joining, *now.starting]
        return len(now.serving) > 1 and not now.leaving and len(run.replicas()) == len(there)

    def may_scale() -> bool:  # else a replica that starts would be given up, in the place of one that leaves
        now = fleet()
        return not (now.starting or now.joining or now.leaving)

    for number, kind in enumerate(drawn):
        due = (number + 1) * 9 * steps // (10 * events)
        if not run.reaches(lambda due=due: len(run.events("training_step")) >= due):  # type: ignore[misc]
            break
        hold.touch()
        if not run.reaches(may_kill if kind == KILL else may_scale):
            break
        if kind == KILL:
            chance.choice(run.replicas()).kill()
            deaths = done[KILL] + 1
            run.reaches(lambda deaths=deaths: len(run.events("replica_lost")) >= deaths)  # type: ignore[misc]
        else:
            serving = len(fleet().serving)
            kind = MORE if serving <= FEWEST else FEWER if serving >= MOST else kind  # noqa: PLW2901
            wanted = str(serving + (1 if kind == MORE else -1))
            command = [WEIGHTLANE, "scale", str(run.directory), "--replicas", wanted, "--no-wait"]
            if subprocess.run(command, capture_output=True, check=False, timeout=_SCALE_S).returncode:  # noqa: S603 - the run has ended
                break
        done[kind] += 1
        hold.unlink()
        say(f"step {len(run.events('training_step'))}: {kind} ({number + 1} of {events})")
    hold.unlink(missing_ok=True)
    return done


def row_of(run: WatchedRun, done: Counter[str], before: list[list[str]] | None) -> Report:
    """The figures of a run that has ended, with the prompts of its steps; `before` are those of the undisturbed run, if any."""
    steps, (started,) = run.events("training_step"), run.events("run_started")
    lost, joined, gone = (run.events(f"replica_{name}") for name in ("lost", "joined", "left"))
    unborn = sum("could not start" in event["error"] for event in lost)
    starts = done[MORE] + sum(bool(event["successor"]) for event in lost)
    summary = json.loads((run.directory / "summary.json").read_text())
    died, replaced, added, left = (summary[f"replicas_{name}"] for name in ("lost", "replaced", "added", "left"))
    prompts = prompts_of(run.directory / "samples.jsonl")
    checks = {
        "every step was made once": [event["step"] for event in steps] == list(range(1, len(steps) + 1)),
        "no sample failed": not summary["samples"]["failed"],
        "each prompt was trained once, by a full group": trained_once(prompts) and len(prompts) == len(steps),
        "in the same step as without disturbance": before in (None, prompts),
        "each death is told": done[KILL] == len(lost) == died + unborn,
        "each departure is told": done[FEWER] == len(gone) == left and not any(event["error"] for event in gone),
        # The last ones may still start, or wait for a version, when the run ends.
        "each join is told": added + replaced == len(joined)
        and REPLICAS + len(joined) + unborn <= len(run.replica_pids) <= REPLICAS + starts,
    }
    return {
        "done": {kind: done[kind] for kind in KINDS},
        "told": {"died": died, "killed while starting": unborn, "replaced": replaced, "added": added, "left": left},
        "replica_processes": len(run.replica_pids),
        "steps": len(steps),
        "samples": sum(map(len, prompts)),
        "staleness_max": max(event["staleness_max"] for event in steps),
        "wall_s": steps[-1]["time"] - started["time"],
        "checks": checks,
        "prompts": prompts,
    }


def prompts_of(samples: Path) -> list[list[str]]:
    """The prompts of all trained samples in order, by step."""
    found: dict[int, list[str]] = {}
    for line in map(json.loads, samples.read_text().splitlines()):
        found.setdefault(line["step"], []).append(line["prompt"])
    return [found[step] for step in sorted(found)]


def trained_once(prompts: list[list[str]]) -> bool:
    """Whether each step has full groups only, and no prompt is in two of them."""
    groups = [Counter(step) for step in prompts]
    full = all(len(each) == PROMPTS_PER_STEP and set(each.values()) == {GROUP_SIZE} for each in groups)
    return full and len(set().union(*groups)) == PROMPTS_PER_STEP * len(groups)


def measure(folder: Path, seeds: Sequence[int], steps: int, events: int) -> Report:
    """Make both runs of every seed in `folder`, one after the other."""
    rows: list[dict[str, Any]] = []
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    example = runpy.run_path(str(EXAMPLE / "prepare.py"))
    if not (folder / "task").exists():
        example["prepare"](folder / "task", {"seed": 0, "steps": 300, "target": 0.4})
    shutil.copy(EXAMPLE / "arithmetic.toml", folder)
    (folder / "reward.py").write_text(REWARD)
    tasks = (folder / "task/train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(tasks[: steps * PROMPTS_PER_STEP]))  # each is trained once
    heldout = [json.loads(line) for line in (folder / "task/heldout.jsonl").read_text().splitlines()]

    def accuracy_of(model: Path) -> float:
        rows = example["encode"](AutoTokenizer.from_pretrained(folder / "task/model"), heldout)
        return float(example["accuracy"](AutoModelForCausalLM.from_pretrained(model), *rows))

    first = accuracy_of(folder / "task/model")
    for seed in seeds:
        before = None
        for mode in MODES:
            run = start(folder, f"{mode}-{seed}", seed, steps)
            try:
                done = disturb(run, folder / "hold", seed, steps, events if mode == "disturbed" else 0)
                left = run.left_behind()
            finally:
                run.close()
            row = row_of(run, done, before)
            row["checks"]["nothing is left"] = not left
            before = row.pop("prompts")
            accuracy = accuracy_of(run.directory / "model")
            rows.append({"mode": mode, "seed": seed, "accuracy": accuracy, **row, "left_behind": left})
            say(f"{mode}, seed {seed}: {json.dumps(rows[-1])}")
    settings = {"steps": steps, "events": events, "samples": GROUP_SIZE * PROMPTS_PER_STEP, "accuracy_before": first}
    return report_of(settings, rows)


def report_of(settings: Report, rows: Sequence[Report]) -> Report:
    """The report of some runs with the same settings, two of each seed."""
    means = [statistics.fmean(row["accuracy"] for row in rows if row["mode"] == mode) for mode in MODES]
    disturbed = [sum(row["done"].values()) for row in rows if row["mode"] == "disturbed"]
    return {
        "settings": settings,
        "rows": rows,
        "verified": all(all(row["checks"].values()) for row in rows),
        "met": abs(means[1] - means[0]) <= APART and set(disturbed) == {settings["events"]},
    }


def text(report: Report) -> str:
    """A line for each run."""
    rows = []
    for row in report["rows"]:
        failed = [name for name, holds in row["checks"].items() if not holds]
        done, told = ([*row[name].values()] for name in ("done", "told"))
        times = f"{row['accuracy']:.3f}", f"{row['wall_s']:.0f}", f"not so: {', '.join(failed)}" if failed else "yes"
        rows.append((row["mode"], row["seed"], *done, *told, row["replica_processes"], f"{row['samples']:,}", *times))
    columns = ("run", "seed", "killed", "one more", "one fewer", *report["rows"][0]["told"], "replica processes")
    return table((*columns, "samples, each once", "accuracy at the end", "s", "verified"), rows)


def markdown(report: Report) -> str:
    """Where and when it was measured, and the table."""
    machine, settings = report["machine"], report["settings"]
    about = (
        f"{settings['steps']} steps of {settings['samples']} samples, accuracy {settings['accuracy_before']:.3f} before"
    )
    return f"{machine['cores']} cores of {machine['cpu']}, {report['date']}: {about}.\n\n{text(report)}"


def main(arguments: list[str] | None = None) -> int:
    """Make the runs, and print the table."""
    parser = options_of(__doc__)
    parser.add_argument("--seed", type=int, action="append", help="of both runs; repeatable; 0, 1 and 2 by default")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--events", type=int, default=30, help="of each disturbed run")
    parser.add_argument("--folder", type=Path, help="keeps the files of the runs; its model is used again")
    asked = parser.parse_args(arguments)

    def measured() -> Report:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (asked.folder or Path(temporary)).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            return measure(folder, asked.seed or [0, 1, 2], asked.steps, asked.events)

    return finish("kills", measured, text, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
