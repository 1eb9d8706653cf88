"""A run of `weightlane train` in asynchronous and in synchronous mode, on the same devices, by samples per second and accuracy.

    python -m benchmarks.training.async_against_sync --json async-against-sync.json

The runs of a seed differ by `loop.max_staleness` alone: with 0, nothing is generated while a step is made and the other way
round; above 0, both go on. The task (`multiples`) has completions of 5 to 49 tokens, and each step trains 16 groups of 8. One
trainer rank and one vLLM replica compute with a thread each.

Two settings: ``none`` is what this machine gives, whose two cores trainer, rollout, Ray and the loop share. In ``delays`` both
sides wait as one waits for a GPU, without a core: a forward pass of vLLM takes at least `PASS_S` seconds, whatever its batch,
and a training step `TOKEN_S` seconds more for each token that it reads. vLLM gets this from a plugin, and the trainer from an
objective of its own, which this program writes; the product is the same in both.

Samples per second are those of the steps after the first `FIRST_STEPS`, in which both sides do things for the first time.
Accuracies are measured after the run, of the models that it exported, so they cost the run nothing: the share of 250 held-out
tasks that greedy decoding answers rightly. Their times count from the start of the loop.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import Report, finish, options_of, say, shown, spread, table
from benchmarks.training import multiples
from benchmarks.training.watched_run import WatchedRun

GROUP_SIZE, PROMPTS_PER_STEP = 8, 16
MODES = {"synchronous": 0, "asynchronous": 2}
"""``loop.max_staleness`` by the mode's name."""
FIRST_STEPS = 3
PASS_S, TOKEN_S = 0.02, 0.0003
SETTINGS = ("none", "delays")
AIM = 1.5
"""Least samples per second of the asynchronous mode, in those of the synchronous one, with delays."""
APART = 0.05
"""Most difference of mean accuracies at the end."""
ABOUT = {
    "none": "no delays: all processes share two cores",
    "delays": f"delays as of a GPU: {1000 * PASS_S:.0f} ms a forward pass of vLLM, {1000 * TOKEN_S:.1f} ms a trained token",
}
COLOURS = {"synchronous": "#b07aa1", "asynchronous": "#4e79a7"}

SLOW_VLLM = f"""
import time

def register():
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(GPUModelRunner, "without_delay"):
        return
    GPUModelRunner.without_delay = run = GPUModelRunner.execute_model

    def execute_model(self, scheduled, *args, **more):
        began = time.perf_counter()
        found = run(self, scheduled, *args, **more)
        if scheduled.total_num_scheduled_tokens:
            time.sleep(max(0.0, {PASS_S} + began - time.perf_counter()))
        return found

    GPUModelRunner.execute_model = execute_model
"""
SLOW_LOSS = f"""
import time
from weightlane.trainer import AlgorithmConfig
from weightlane.trainer.objectives.policy import dual_clip

LOSS = dual_clip(AlgorithmConfig())

def loss(outputs, micro):
    time.sleep({TOKEN_S} * len(micro.tokens))
    return LOSS(outputs, micro)
"""


def configuration(
    folder: Path, run: Path, *, seed: int, mode: str, delays: bool, steps: int, export_every: int, rate: float
) -> str:
    """The run's configuration."""
    return f"""
[run]
dir = "{run}"
seed = {seed}
[model]
path = "{folder}/model"
[data]
train = "{folder}/train.jsonl"
heldout = "{folder}/heldout.jsonl"
[reward]
function = "reward:exact_match"
[loop]
steps = {steps}
max_staleness = {MODES[mode]}
evaluate_tasks = 8
export_every = {export_every}
save_every = 0
[algorithm]
objective = "{"slow_loss:loss" if delays else "dual_clip"}"
group_size = {GROUP_SIZE}
prompts_per_step = {PROMPTS_PER_STEP}
max_new_tokens = {multiples.LONGEST}
[trainer]
learning_rate = {rate}
lr_warmup_steps = 5
betas = [0.9, 0.98]
cpus_per_rank = 0.5
[rollout]
dtype = "float32"
max_model_len = {multiples.CONTEXT}
max_num_seqs = {GROUP_SIZE * PROMPTS_PER_STEP}
concurrency = {GROUP_SIZE * PROMPTS_PER_STEP}
kv_cache_memory_bytes = {64 << 20}
cpus_per_rank = 0.5
[rollout.extra_engine_args]
distributed_executor_backend = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
[checkpoint_engine]
backend = "shm"
"""


def install_delays(folder: Path) -> Path:
    """Write the trainer's objective beside the configuration, and vLLM's plugin as an installed one; returns its folder."""
    (folder / "slow_loss.py").write_text(SLOW_LOSS)
    site = folder / "site"
    info = site / "slow_vllm-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "slow_vllm.py").write_text(SLOW_VLLM)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow_vllm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nslow = slow_vllm:register\n")
    return site


def run_once(folder: Path, name: str, text: str, site: Path | None) -> list[dict[str, Any]]:
    """Make a run; returns its events. Raises `subprocess.SubprocessError` if it fails, `TimeoutError` if it takes too long."""
    path = folder / f"{name}.toml"
    path.write_text(text)
    found = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = WatchedRun(path, folder / name, {} if site is None else {"PYTHONPATH": os.pathsep.join(found)})
    try:
        run.left_behind()
        return run.events()
    finally:
        run.close()


def row_of(events: Sequence[Mapping[str, Any]], accuracies: Mapping[int, float]) -> dict[str, Any]:
    """The figures of a run; `accuracies` are those of its versions."""
    (started,) = (event["time"] for event in events if event["event"] == "run_started")
    steps = [event for event in events if event["event"] == "training_step"]
    ended_s = {0: 0.0} | {event["step"]: event["time"] - started for event in steps}
    wall_s = ended_s[len(steps)]
    samples = GROUP_SIZE * PROMPTS_PER_STEP * (len(steps) - FIRST_STEPS)
    return {
        "samples_per_s": samples / (wall_s - ended_s[FIRST_STEPS]),
        "wall_s": wall_s,
        "staleness_mean": statistics.fmean(event["staleness_mean"] for event in steps),
        "staleness_max": max(event["staleness_max"] for event in steps),
        "training_share": sum(event["seconds"] for event in steps) / wall_s,
        "overlap_share": steps[-1]["overlap_share"],
        "failed": steps[-1]["failed_items"] + steps[-1]["dropped_groups"],
        "curve": [[ended_s[step], accuracy] for step, accuracy in sorted(accuracies.items())],
    }


def measure(settings: Sequence[str], seeds: int, steps: int, export_every: int, target: float, rate: float) -> Report:
    """Make all runs, those that are compared one after the other."""
    rows = []
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        heldout = multiples.prepare(folder, target=target, most_steps=600)
        first = multiples.accuracy_of(folder / "model", heldout)
        say(f"held-out accuracy {first:.2f} after {time.perf_counter() - began:.0f} s")
        site = install_delays(folder)
        for seed in range(seeds):
            for setting in settings:
                for mode in MODES:
                    run = f"{setting}-{mode}-{seed}"
                    about: dict[str, Any] = {"seed": seed, "mode": mode, "delays": setting == "delays", "rate": rate}
                    text = configuration(folder, folder / run, **about, steps=steps, export_every=export_every)
                    events = run_once(folder, run, text, site if about["delays"] else None)
                    exported = {step: folder / run / f"exports/step-{step}" for step in range(1, steps)}
                    models = {step: path for step, path in exported.items() if path.is_dir()} | {
                        steps: folder / run / "model"
                    }
                    accuracies = {step: multiples.accuracy_of(path, heldout) for step, path in models.items()}
                    rows.append(
                        {"setting": setting, "mode": mode, "seed": seed, **row_of(events, {0: first} | accuracies)}
                    )
                    say(f"{run}: {rows[-1]['samples_per_s']:.1f} samples/s, accuracy {rows[-1]['curve'][-1][1]:.2f}")
    report = {
        "settings": {
            "steps": steps,
            "seeds": seeds,
            "pass_s": PASS_S,
            "token_s": TOKEN_S,
            "samples": GROUP_SIZE * PROMPTS_PER_STEP,
            "learning_rate": rate,
        },
        "rows": rows,
        "verified": all(not row["failed"] and row["staleness_max"] <= MODES[row["mode"]] for row in rows),
    }
    aimed = settings[-1]
    return {**report, "met": ratio(report, aimed) >= AIM and apart(report, aimed) <= APART}


def of(report: Report, setting: str, mode: str) -> list[dict[str, Any]]:
    """The rows of a setting and a mode, by seed."""
    return [row for row in report["rows"] if (row["setting"], row["mode"]) == (setting, mode)]


def ratio(report: Report, setting: str) -> float:
    """Samples per second of the asynchronous mode in those of the synchronous one: the median over the seeds."""
    pairs = zip(*(of(report, setting, mode) for mode in MODES), strict=True)
    return statistics.median(fast["samples_per_s"] / slow["samples_per_s"] for slow, fast in pairs)


def apart(report: Report, setting: str) -> float:
    """By how much the modes' mean accuracies differ at the end."""
    means = [statistics.fmean(row["curve"][-1][1] for row in of(report, setting, mode)) for mode in MODES]
    return abs(means[1] - means[0])


def level(report: Report, setting: str) -> float:
    """The highest accuracy that every run of a setting reaches."""
    return min(max(accuracy for _, accuracy in row["curve"]) for row in report["rows"] if row["setting"] == setting)


def text(report: Report) -> str:
    """A line for each setting and mode."""
    rows = []
    for setting in dict.fromkeys(row["setting"] for row in report["rows"]):
        wanted = level(report, setting)
        for mode, staleness in MODES.items():
            found = of(report, setting, mode)
            reached = [next(at for at, accuracy in row["curve"] if accuracy >= wanted) for row in found]
            rows.append(
                (
                    ABOUT[setting],
                    f"{mode}, `max_staleness = {staleness}`",
                    shown(spread(row["samples_per_s"] for row in found)),
                    "" if not staleness else f"{ratio(report, setting):.2f}",
                    f"{statistics.fmean(row['curve'][-1][1] for row in found):.2f}",
                    f"{wanted:.2f} in {shown(spread(reached))}",
                    f"{statistics.fmean(row['staleness_mean'] for row in found):.2f}",
                    f"{statistics.fmean(row['training_share'] for row in found):.0%}",
                )
            )
    columns = ("setting", "mode", "samples/s", "times synchronous", "accuracy at the end", "accuracy in seconds")
    return table((*columns, "staleness, mean", "time in training"), rows)


def markdown(report: Report) -> str:
    """The picture, where and when it was measured, and the table."""
    machine, settings = report["machine"], report["settings"]
    return (
        "![Held-out accuracy over time in both modes, a thin line for each seed](async-against-sync.svg)\n\n"
        f"{machine['cores']} cores of {machine['cpu']}, {report['date']}: {settings['seeds']} seeds, {settings['steps']} steps of"
        f" {settings['samples']} samples. Medians, least and most of the seeds; accuracies are means.\n\n{text(report)}"
    )


def draw(report: Report, path: Path) -> None:
    """Draw accuracy over wall time: a thin line for each seed, a thick one for their mean."""
    import matplotlib as mpl  # optional, and slow to import
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys(row["setting"] for row in report["rows"]))
    with mpl.rc_context({"svg.hashsalt": "weightlane", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        for axes, setting in zip(
            figure.subplots(1, len(settings), sharey=True, squeeze=False)[0], settings, strict=True
        ):
            for mode in MODES:
                found = of(report, setting, mode)
                for row in found:
                    axes.plot(*zip(*row["curve"], strict=True), color=COLOURS[mode], linewidth=0.7, alpha=0.5)
                rate = statistics.median(row["samples_per_s"] for row in found)
                points = [
                    tuple(map(statistics.fmean, zip(*each, strict=True)))
                    for each in zip(*(row["curve"] for row in found), strict=True)
                ]
                axes.plot(*zip(*points, strict=True), "o-", color=COLOURS[mode], label=f"{mode}: {rate:.0f} samples/s")
            axes.set_title(f"{ratio(report, setting):.2f} times the samples per second,\n{ABOUT[setting]}", fontsize=9)
            axes.set_xlabel("seconds since the start of training")
            axes.legend(loc="lower right")
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel("held-out accuracy")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: list[str] | None = None) -> int:
    """Make the runs, and print the table."""
    parser = options_of(__doc__)
    parser.add_argument("--setting", choices=SETTINGS, action="append", help="both by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--export-every", type=int, default=5, help="steps between accuracies")
    parser.add_argument("--target", type=float, default=0.3, help="accuracy at which the warm-up ends")
    parser.add_argument("--learning-rate", type=float, default=1.5e-4)
    asked = parser.parse_args(arguments)

    def measured() -> Report:
        settings = [each for each in SETTINGS if each in (asked.setting or SETTINGS)]
        return measure(settings, asked.seeds, asked.steps, asked.export_every, asked.target, asked.learning_rate)

    return finish("async-against-sync", measured, text, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
