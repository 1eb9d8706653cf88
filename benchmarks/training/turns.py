"""The memory of trainer and rollout in a run in which they take turns (`trainer.colocate`), by turn and process.

    python -m benchmarks.training.turns --json turns.json

A run of `weightlane train` on a random Qwen3 that has nothing to learn. What a process holds at the end of a turn is measured
once it has freed what only this turn needs: on a CPU resident memory, without the copies that stand for the host's memory of a
GPU. The peak is the most since the turn before; on a CPU it has these copies, too.
"""

from __future__ import annotations

import json
import runpy
import statistics
import tempfile
from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.command import Report, finish, options_of, say, table
from benchmarks.training.watched_run import WatchedRun

ROOT = Path(__file__).resolve().parents[2]
TURNS = ("generation", "training", "sync")
REWARD = "def reward(completion, task):\n    return sum(map(ord, completion)) % 7\n"


def configuration(folder: Path, hidden: int, layers: int, steps: int, cache_mib: int) -> Path:
    """Write a model, tasks, a reward and the run's configuration into `folder`. Returns the configuration."""
    example = runpy.run_path(str(ROOT / "examples/arithmetic/prepare.py"))
    tokenizer = example["make_tokenizer"]()
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    model = Qwen3ForCausalLM(config)
    say(f"a Qwen3 of {sum(each.numel() for each in model.parameters()) / 1e6:.0f} million parameters")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    tasks = example["make_tasks"](0)
    for name, part in (("heldout", tasks[:4]), ("train", tasks[4:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in part))
    (folder / "reward.py").write_text(REWARD)
    path = folder / "run.toml"
    path.write_text(f"""
[run]
dir = "{folder}/run"
[model]
path = "{folder}/model"
[data]
train = "{folder}/train.jsonl"
heldout = "{folder}/heldout.jsonl"
[reward]
function = "reward:reward"
[loop]
steps = {steps}
max_staleness = 0
[algorithm]
group_size = 8
prompts_per_step = 4
max_new_tokens = 16
[trainer]
colocate = true
cpus_per_rank = 0.5
[rollout]
commit = "in_place"
max_model_len = 64
kv_cache_memory_bytes = {cache_mib << 20}
cpus_per_rank = 0.5
start_timeout_s = 1800
[sync]
quorum = 1.0
deadline_s = 600
""")
    return path


def measure(hidden: int, layers: int, steps: int, cache_mib: int) -> Report:
    """Make the run, and read its turns. Raises `subprocess.CalledProcessError` if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = configuration(Path(folder), hidden, layers, steps, cache_mib)
        run = WatchedRun(path, Path(folder) / "run")
        try:
            run.left_behind()
            ended = run.events("turn_ended")
        finally:
            run.close()
    later = ended[4:]  # the first sync, and the turns that touch memory for the first time
    rows = []
    for process in ended[0]["held_bytes"]:
        for turn in TURNS:
            here = [event for event in later if event["turn"] == turn]
            row: dict[str, Any] = {"process": process, "turn": turn}
            for figure in ("held_bytes", "peak_bytes"):
                row[figure] = statistics.median(event[figure][process] for event in here)
            rows.append(row)
    settings = {"hidden": hidden, "layers": layers, "steps": steps, "cache_mib": cache_mib}
    return {"settings": settings, "rows": rows, "verified": True}


def text(report: Report) -> str:
    """One line for each process and turn."""
    rows = [
        [row["process"], row["turn"], *(f"{row[figure] / 2**20:,.0f}" for figure in ("held_bytes", "peak_bytes"))]
        for row in report["rows"]
    ]
    return table(("process", "turn", "held at its end, MiB", "peak, MiB"), rows)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = options_of(__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--cache-mib", type=int, default=256)
    options = parser.parse_args(arguments)
    return finish(
        "turns",
        lambda: measure(options.hidden, options.layers, options.steps, options.cache_mib),
        text,
        options.json,
    )


if __name__ == "__main__":
    raise SystemExit(main())
