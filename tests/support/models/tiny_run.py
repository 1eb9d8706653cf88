"""Material for a run that starts in seconds: a tiny random Qwen3, a byte tokenizer, forty tasks, a reward and a TOML file."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed
from waiting import HANG_S

EXAMPLE = Path(__file__).parents[3] / "examples" / "arithmetic"
TRAIN_TASKS, HELDOUT_TASKS = 40, 8
PROMPTS_PER_STEP, GROUP_SIZE = 4, 2
LEARNING_RATE = 1e-3
BETAS = (0.9, 0.999)

IN_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Runs the model in vLLM's engine process, which saves the start of another one. Named in full, since vLLM overrules "uni"."""

REWARDS = '''
import json
import time
from pathlib import Path

def low_bytes(completion, task):
    """Something a random model can get partly right: the share of characters below 'm'."""
    return sum(character < "m" for character in completion) / max(1, len(completion))

def unhurried(completion, task):
    """As `low_bytes`, and leaves the cores to others meanwhile."""
    time.sleep(0.03)
    return low_bytes(completion, task)

def remember(task):
    with Path(__file__).with_name("judged.txt").open("a") as file:
        file.write(task["prompt"] + "\\n")

def remembering(completion, task):
    """As `low_bytes`; notes beside this file what it judged, with its tokens and their log-probabilities."""
    remember(task)
    noted = {"prompt": task["prompt"], "completion": completion}
    noted |= {"token_ids": completion.token_ids, "logprobs": completion.logprobs}
    with Path(__file__).with_name("noted.jsonl").open("a") as file:
        file.write(json.dumps(noted) + "\\n")
    return low_bytes(completion, task)
'''


def toml_of(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A configuration with these tables, of values that TOML writes as JSON does, and without keys whose value is None."""
    lines = []
    for name, keys in tables.items():
        given = {key: value for key, value in keys.items() if value is not None}
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in given.items()), ""]
    return "\n".join(lines)


@dataclass(frozen=True)
class Material:
    """Where everything lies."""

    folder: Path
    model: Path
    train: Path
    heldout: Path

    def toml(self, run_dir: Path, **sections: dict[str, Any]) -> str:
        """A configuration for a run in `run_dir`; `sections` add to it or replace its keys."""
        tables: dict[str, dict[str, Any]] = {
            "run": {"dir": str(run_dir)},
            "model": {"path": str(self.model)},
            "data": {"train": str(self.train), "heldout": str(self.heldout)},
            "reward": {"function": "rewards_of_test:low_bytes"},
            "loop": {"steps": 3, "max_staleness": 1, "blocking_syncs": 1, "evaluate_tasks": HELDOUT_TASKS},
            "algorithm": {"group_size": GROUP_SIZE, "prompts_per_step": PROMPTS_PER_STEP, "max_new_tokens": 6},
            "trainer": {"ranks": 1, "learning_rate": 1e-3, "cpus_per_rank": 0.5},
            "rollout": {
                "dtype": "float32",
                "max_model_len": 64,
                "max_num_seqs": 16,
                "concurrency": 16,
                "kv_cache_memory_bytes": 16 << 20,
                "cpus_per_rank": 0.5,
            },
            "sync": {"bucket_mib": 0.125, "deadline_s": HANG_S},
            "ray": {"start_timeout_s": HANG_S},
        }
        for name, keys in sections.items():
            tables.setdefault(name, {}).update(keys)
        if tables["rollout"].get("tensor_parallel", 1) == 1 and not {"engine", "sizes"} & tables["rollout"].keys():
            tables.setdefault("rollout.extra_engine_args", {}).setdefault("distributed_executor_backend", IN_ENGINE)
        return toml_of(tables)

    def write_config(self, folder: Path, run_dir: Path, **sections: dict[str, Any]) -> Path:
        """Write a configuration, with the reward functions beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rewards_of_test.py").write_text(REWARDS)
        path = folder / "run.toml"
        path.write_text(self.toml(run_dir, **sections))
        return path


def make_material(folder: Path) -> Material:
    """Make model, tokenizer and tasks under `folder`."""
    prepare = runpy.run_path(str(EXAMPLE / "prepare.py"))
    tokenizer = prepare["make_tokenizer"]()
    set_seed(0)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = folder / "model"
    Qwen3ForCausalLM(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    tasks = prepare["make_tasks"](0)
    material = Material(folder, model, folder / "train.jsonl", folder / "heldout.jsonl")
    for path, part in (
        (material.train, tasks[:TRAIN_TASKS]),
        (material.heldout, tasks[TRAIN_TASKS : TRAIN_TASKS + HELDOUT_TASKS]),
    ):
        path.write_text("".join(json.dumps(task) + "\n" for task in part))
    return material
